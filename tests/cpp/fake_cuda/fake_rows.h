/** Rows in the store, for kernels that are host code. */
#pragma once

#include <cstring>
#include <vector>

#include "fake.h"
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
void each_row_part(const RowsCall& call, const std::vector<RowsItem>& items, Move move) {
  const RowFormat& format = call.shape.rows;
  const int64_t size = size_of(call.shape.dtype);
  int64_t packed = 0;
  for (const RowsItem& item : items) {
    for (int64_t t = 0; t < item.tokens; ++t, ++packed) {
      for (int64_t head = 0; head < call.shape.kv_heads; ++head) {
        char* row = row_of(*item.sequence, call.shape, head, item.begin + t);
        const auto outside = [&](const Rows& rows) {
          return rows.data + (packed * rows.stride_i + head * rows.stride_j) * size;
        };
        move(row, outside(call.k), format.key_bytes());
        move(row + format.key_bytes(), outside(call.v), format.value_bytes());
      }
    }
  }
}

/** A row of a page table: every page has to be one. */
inline void fill_page_row(const PageFill& fill, const ModelShape& shape, const SequenceView& view,
                          int64_t row, int64_t tokens) {
  const int64_t count = (tokens + shape.segment_tokens - 1) / shape.segment_tokens;
  if (count > fill.width) test::complain("a row of the page table is too short");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = static_cast<const char*>(view.rows[i]) - fill.first;
    if (at < 0 || at >= fill.range_bytes || at % fill.page_bytes != 0) {
      test::complain("rows without a page number");
    }
    fill.pages[row * fill.width + i] = int32_t(at / fill.page_bytes);
  }
}

inline void append_rows(const RowsCall& call, const std::vector<RowsItem>& items) {
  each_row_part(call, items, [](char* row, char* outside, int64_t bytes) {
    std::memcpy(row, outside, size_t(bytes));
  });
  for (const RowsItem& item : items) {
    if (call.fill.first == nullptr) break;
    const bool served = item.page_row >= 0;
    const int64_t row = served ? item.page_row : ~item.page_row, total = item.begin + item.tokens;
    if (served) fill_page_row(call.fill, call.shape, *item.sequence, row, total);
    call.fill.lengths[row] = served ? int32_t(total) : 0;
  }
}

/** The new token of row i of a batch, to its place. */
inline void append_token(const ModelShape& shape, const SequenceView& view, Rows k, Rows v,
                         int64_t i) {
  const int64_t size = size_of(shape.dtype);
  k.data += i * k.stride_i * size;
  v.data += i * v.stride_i * size;
  append_rows({shape, nullptr, 1, k, v, {}}, {{&view, view.total - 1, 1, 0}});
}

}  // namespace pariskv::cuda
