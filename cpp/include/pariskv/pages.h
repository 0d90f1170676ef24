/**
 * Plain rows as pages that other kernels can read: FlashAttention, FlashInfer, one of a program's
 * own. On a GPU the rows of a segment are a page, and all pages of a cache, of every layer and
 * sequence, lie in one range of addresses.
 *
 *   const pariskv::Pages pages = cache.pages();
 *   const pariskv::PageTable table = cache.page_table(64, 8192);
 *   cache.prefill(layer, batch, lengths, k, v, options, stream);  // options.page_rows = {{0, 1}}
 *   attention(q, pages.keys(), pages.values(), table.pages, table.lengths, stream);
 *
 * Work that reads pages belongs on the stream of the cache's calls: what a later call changes comes
 * after it.
 */
#pragma once

#include <cstdint>

#include "pariskv/tensor_view.h"

namespace pariskv {

struct Pages {
  /**
   * (pages, kv_heads, tokens, head_dim + value_dim): a row is K, then V. Most pages of the range
   * have no memory behind them: a page may be read where a table names it.
   */
  TensorView rows;
  int64_t head_dim;

  /** (pages, tokens, kv_heads, head_dim) */
  TensorView keys() const { return part(0, head_dim); }
  /** (pages, tokens, kv_heads, value_dim) */
  TensorView values() const { return part(head_dim, rows.shape[3] - head_dim); }

 private:
  TensorView part(int64_t first, int64_t count) const {
    TensorView view = rows;
    view.data = static_cast<char*>(view.data) + first * size_of(rows.dtype);
    view.shape[1] = rows.shape[2], view.strides[1] = rows.strides[2];
    view.shape[2] = rows.shape[1], view.strides[2] = rows.strides[1];
    view.shape[3] = count;
    return view;
  }
};

/**
 * Which pages the sequences of a step have in the layer that was last stored to, in the device's
 * memory. A call that stores tokens fills the rows that it is told, see PrefillOptions::page_rows
 * and AttendOptions::dense.
 */
struct PageTable {
  int32_t* pages;    ///< (rows, width) numbers of pages; behind a sequence's last one, anything.
  int32_t* lengths;  ///< (rows) tokens; 0: these pages do not serve the sequence.
  int64_t rows, width;
};

}  // namespace pariskv
