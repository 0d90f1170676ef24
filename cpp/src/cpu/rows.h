/**
 * Stored rows in host memory: where they lie, and how they are read and written. All code of the
 * CPU that touches one is here or calls a kernel with addresses from here.
 */
#pragma once

#include "cpu/simd/kernels.h"
#include "ops.h"

namespace pariskv::cpu {

/** Where a row's K and V lie: they need not lie together. */
struct RowPlace {
  char* key;
  char* value;
};

/** The row of a position, in the blocks of a table. */
inline RowPlace row_in(void* const* table, const RowLayout& layout, int64_t head,
                       int64_t position) {
  const int64_t block = position / layout.tokens, slot = position % layout.tokens;
  void* const* pointers = table + block * layout.pointers;
  if (layout.borrowed) {
    const RowAddress& row = static_cast<const RowAddress*>(pointers[0])[slot];
    return {row.key + head * layout.key.head, row.value + head * layout.value.head};
  }
  const auto half = [&](const RowLayout::Half& own) {
    return static_cast<char*>(pointers[own.pointer]) + own.at(head, slot);
  };
  return {half(layout.key), half(layout.value)};
}

/** The plain row of a position, and the narrow one: where either is there. */
inline RowPlace plain_row_at(const ModelShape& shape, const SequenceView& sequence, int64_t head,
                             int64_t position) {
  return row_in(sequence.rows, shape.layout, head, position);
}
inline RowPlace narrow_row_at(const ModelShape& shape, const SequenceView& sequence, int64_t head,
                              int64_t position) {
  return row_in(sequence.narrow_rows, shape.narrow_layout, head, position);
}

/** The halves of a copy of a row, which lie together. */
inline RowPlace halves_of(const RowFormat& rows, char* copy) {
  return {copy, copy + rows.key_bytes()};
}

/** The copy of a row of the tail in a block of them, by its number among them. */
inline RowPlace tail_copy(const ModelShape& shape, const TailCopies& copies, char* block,
                          int64_t head, int64_t number) {
  return halves_of(shape.tail_rows(), block + copies.row_offset(head, number));
}

/** Row i of a head, in a block of kept rows. */
inline RowPlace kept_row(const ModelShape& shape, const KeptLayout& layout, char* block,
                         int64_t head, int64_t i) {
  return halves_of(shape.rows, layout.row(block, head, i));
}

/** All of a row, as it is written. */
void copy_row(const RowFormat& rows, const RowPlace& from, const RowPlace& to);

/** A row from one format to another; bytes as they are where they are equal. */
void convert_row(const Kernels& kernels, const RowPlace& from, const RowFormat& from_format,
                 const RowPlace& to, const RowFormat& to_format);

/** A stored key as floats. */
inline void read_key(const Kernels& kernels, const RowFormat& rows, const char* key, float* out) {
  kernels.to_float(key, rows.key, rows.key_dim, out);
}

/** Element (i, j, 0) of a rank-3 view. */
inline char* element_at(const TensorView& view, int64_t i, int64_t j) {
  return static_cast<char*>(view.data) +
         (i * view.strides[0] + j * view.strides[1]) * size_of(view.dtype);
}

/** A query as floats. */
inline void read_query(const Kernels& kernels, const ModelShape& shape, const TensorView& q,
                       int64_t row, int64_t head, float* out) {
  kernels.to_float(element_at(q, row, head), row_type(shape.dtype), shape.rows.key_dim, out);
}

/** Writes floats as a half of a row. */
void write_half(const float* numbers, int64_t dim, RowType type, char* half);

/** Where K or V of a row comes from or goes to, and how it is written there. */
struct HalfPlace {
  char* half;
  RowType type;
};

/** Stores K or V of a new row, or puts a stored one out: bytes as they are if types are equal. */
void convert_half(const Kernels& kernels, int64_t dim, const HalfPlace& from, const HalfPlace& to);

}  // namespace pariskv::cpu
