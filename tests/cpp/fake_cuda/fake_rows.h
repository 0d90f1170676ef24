/** Rows in the store, for kernels that are host code. */
#pragma once

#include <cstring>

#include "kernels.h"

namespace pariskv::cuda {

inline char* row_in(void* const* table, const RowFormat& rows, const ModelShape& shape,
                    int64_t head, int64_t position) {
  return static_cast<char*>(table[position / shape.segment_tokens]) +
         (head * shape.segment_tokens + position % shape.segment_tokens) * rows.bytes();
}
/** A plain row; and one of the zone, which may be narrow. */
inline char* row_of(const SequenceView& view, const ModelShape& shape, int64_t head,
                    int64_t position) {
  return row_in(view.rows, shape.rows, shape, head, position);
}
inline char* zone_row_of(const SequenceView& view, const ModelShape& shape, int64_t head,
                         int64_t position) {
  return row_in(shape.narrows() ? view.narrow_rows : view.rows, shape.zone_rows(), shape, head,
                position);
}

/** Calls `move(row in the store, outside, bytes)` for K and V of every token and head. */
template <typename Move>
void each_row_part(const RowsCall& call, Move move) {
  const RowFormat& format = call.shape.rows;
  const int64_t size = size_of(call.shape.dtype);
  for (int64_t t = 0; t < call.tokens; ++t) {
    for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
      char* row = row_of(*call.sequence, call.shape, head, call.begin + t);
      const auto outside = [&](const Rows& rows) {
        return rows.data + (t * rows.stride_i + head * rows.stride_j) * size;
      };
      move(row, outside(call.k), format.key_bytes());
      move(row + format.key_bytes(), outside(call.v), format.value_bytes());
    }
  }
}

inline void append_rows(const RowsCall& call) {
  each_row_part(call, [](char* row, char* outside, int64_t bytes) {
    std::memcpy(row, outside, size_t(bytes));
  });
}

/** The new token of row i of a batch, to its place. */
inline void append_token(const ModelShape& shape, const SequenceView& view, Rows k, Rows v,
                         int64_t i) {
  const int64_t size = size_of(shape.dtype);
  k.data += i * k.stride_i * size;
  v.data += i * v.stride_i * size;
  append_rows({shape, &view, view.total - 1, 1, k, v});
}

}  // namespace pariskv::cuda
