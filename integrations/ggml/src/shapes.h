/** What the nodes of a host's graph are to us: writes to a KV cache, and attention over it. */
#pragma once

#include <cstdint>

#include "host.h"

namespace pariskv::ggml {

/** A tensor of a KV cache: (dims of all heads, cells, streams), as llama.cpp names and lays it. */
struct CacheTensor {
  const ggml_tensor* root = nullptr;  // null: none
  bool is_key = false;
  int64_t layer = 0;  // of the model

  ggml_backend_buffer_t buffer() const { return root->buffer; }
  int64_t cells() const { return root->ne[1] * root->ne[2]; }
  int64_t stream_cells() const { return root->ne[1]; }
};

/** The cache tensor that this one is, or shows a part of. */
CacheTensor cache_tensor_of(const ggml_tensor* tensor);

/** A write to a cache tensor by the cells' numbers, a row of all heads to each. */
bool is_row_write(const ggml_tensor* op);
/** Where its row of this number goes, over all streams. */
int64_t written_cell(const ggml_tensor* row_write, int64_t row);

/** Attention over a KV cache. */
struct Attention {
  explicit Attention(const ggml_tensor* op);

  const ggml_tensor *q, *k, *v, *mask, *sinks;
  CacheTensor key, value;
  float scale, max_bias, softcap;

  int64_t tokens() const { return q->ne[1]; }  // of a stream
  int64_t streams() const { return q->ne[3]; }
  int64_t rows() const { return tokens() * streams(); }
  int64_t visible_cells() const { return k->ne[1]; }

  /** The number, over all streams, of a stream's first cell. */
  int64_t first_cell(int64_t stream) const {
    return (int64_t(k->view_offs) + stream * int64_t(k->nb[3])) / int64_t(key.root->nb[1]);
  }

  /**
   * Why the engine cannot read it: types, strides, bias. Null: it can. Says nothing of what pays.
   */
  const char* obstacle() const;
};

}  // namespace pariskv::ggml
