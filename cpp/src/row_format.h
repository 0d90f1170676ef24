/**
 * A row, which is what is stored of a token and kv head: K, then V. How it is written is up to its
 * format, whatever the type of the tensors that come in and go out. Device code reads this too.
 */
#pragma once

#include <cstdint>

#include "pariskv/borrowed.h"
#include "pariskv/tensor_view.h"
#include "row_type.h"

namespace pariskv {

/** Bytes of one stored number. */
constexpr int64_t size_of(RowType type) {
  switch (type) {  // no default: a new type is a warning here
    case RowType::kFloat32:
      return 4;
    case RowType::kFloat16:
    case RowType::kBFloat16:
      return 2;
    case RowType::kInt8:
    case RowType::kQ8_0:
      return 1;
  }
  return 0;
}

/** Whether numbers are multiplied by a float of their half. */
constexpr bool has_scale(RowType type) {
  switch (type) {
    case RowType::kFloat32:
    case RowType::kFloat16:
    case RowType::kBFloat16:
      return false;
    case RowType::kInt8:
    case RowType::kQ8_0:
      return true;
  }
  return false;
}

/** The one that elements of a tensor are stored as when they are copied as they are. */
constexpr RowType row_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return RowType::kFloat32;
    case DType::kFloat16:
      return RowType::kFloat16;
    case DType::kBFloat16:
      return RowType::kBFloat16;
  }
  return RowType(0xff);  // code for a type throws at one that it does not know
}

/** How numbers of borrowed rows are stored. */
constexpr RowType row_type(BorrowedType type) {
  switch (type) {
    case BorrowedType::kFloat32:
      return RowType::kFloat32;
    case BorrowedType::kFloat16:
      return RowType::kFloat16;
    case BorrowedType::kBFloat16:
      return RowType::kBFloat16;
    case BorrowedType::kQ8_0:
      return RowType::kQ8_0;
  }
  return RowType(0xff);
}

/** Addresses of borrowed halves are multiples of this. */
constexpr int64_t alignment_of(BorrowedType type) { return type == BorrowedType::kFloat32 ? 4 : 2; }

/** Halves with a scale behind them begin and end at multiples of this, for the scale. */
constexpr int64_t kHalfAlignment = 4;

/** Bytes of K or V: its numbers, then its scale if it has one. Blocks of q8_0 have their own. */
constexpr int64_t half_bytes(RowType type, int64_t dim) {
  if (type == RowType::kQ8_0) return (dim + kQ8Block - 1) / kQ8Block * kQ8BlockBytes;
  const int64_t numbers = dim * size_of(type);
  if (!has_scale(type)) return numbers;
  const int64_t bytes = numbers + int64_t(sizeof(float));
  return (bytes + kHalfAlignment - 1) / kHalfAlignment * kHalfAlignment;
}

struct RowFormat {
  int64_t key_dim;
  int64_t value_dim;
  RowType key;
  RowType value;

  /** Tensors of this type are stored as they are. */
  static constexpr RowFormat plain(int64_t key_dim, int64_t value_dim, DType dtype) {
    return {key_dim, value_dim, row_type(dtype), row_type(dtype)};
  }
  static constexpr RowFormat borrowed(int64_t key_dim, int64_t value_dim,
                                      const BorrowedRows& rows) {
    return {key_dim, value_dim, row_type(rows.key), row_type(rows.value)};
  }
  /** The same dimensions in 8 bits. */
  constexpr RowFormat narrowed() const {
    return {key_dim, value_dim, RowType::kInt8, RowType::kInt8};
  }
  constexpr bool is_plain(DType dtype) const {
    return key == row_type(dtype) && value == row_type(dtype);
  }

  constexpr int64_t elements() const { return key_dim + value_dim; }
  constexpr int64_t key_bytes() const { return half_bytes(key, key_dim); }
  constexpr int64_t value_bytes() const { return half_bytes(value, value_dim); }
  constexpr int64_t bytes() const { return key_bytes() + value_bytes(); }
  /** Of a copy of a row, with all of its first and last vector of 16 bytes. */
  constexpr int64_t copied_bytes() const {
    const int64_t step = bytes() & -bytes(), most_before = step < 16 ? 16 - step : 0;
    return (bytes() + most_before + 15) / 16 * 16;
  }
  /** For such a copy as far from a line of 128 bytes as the row itself, where that matters. */
  constexpr int64_t copied_room() const {
    return has_scale(key) ? (copied_bytes() + 112 + 127) / 128 * 128 : copied_bytes();
  }
  /** Of a scale, in its half. */
  constexpr int64_t key_scale_offset() const { return key_dim * size_of(key); }
  constexpr int64_t value_scale_offset() const { return value_dim * size_of(value); }
};

/** Where a borrowed row lies: K and V of the first kv head. */
struct RowAddress {
  char* key;
  char* value;
};

/**
 * Where rows lie. Positions are in blocks, and a table has one pointer for each block, or one for
 * its keys and one for its values, where these lie apart. Strides and offsets are in bytes.
 */
struct RowLayout {
  struct Half {
    int64_t pointer;  // which of those of a block
    int64_t offset;   // of the first one from there
    int64_t head;     // stride of kv heads
    int64_t token;    // stride of positions

    constexpr int64_t at(int64_t number, int64_t slot) const {
      return offset + number * head + slot * token;
    }
  };

  int64_t tokens;    // positions of a block
  int64_t pointers;  // of a block
  Half key, value;
  bool borrowed = false;  // a block has no rows, but where they are: (tokens) RowAddress

  /** Blocks of (heads, tokens) whole rows. */
  static constexpr RowLayout segments(const RowFormat& rows, int64_t tokens) {
    const int64_t token = rows.bytes(), head = tokens * token;
    return {tokens, 1, {0, 0, head, token}, {0, rows.key_bytes(), head, token}};
  }
  /** Blocks of addresses; heads of a row lie at strides. */
  static constexpr RowLayout addresses(const BorrowedRows& rows, int64_t tokens) {
    return {tokens, 1, {0, 0, rows.key_head_stride, 0}, {0, 0, rows.value_head_stride, 0}, true};
  }
};

}  // namespace pariskv
