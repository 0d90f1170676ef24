#include "shapes.h"

#include <cstdio>
#include <cstring>

namespace pariskv::ggml {

namespace {

bool is_row_type(ggml_type type) {
  return type == GGML_TYPE_F16 || type == GGML_TYPE_F32 || type == GGML_TYPE_BF16 ||
         type == GGML_TYPE_Q8_0;
}

/** Heads of a cell side by side, cells of a stream too: K, and V that is not transposed. */
bool has_rows(const ggml_tensor* view, const CacheTensor& cache) {
  const ggml_tensor* root = cache.root;
  const size_t head = host().ggml_row_size(view->type, view->ne[0]);
  return is_row_type(view->type) && view->type == root->type && view->nb[1] == root->nb[1] &&
         view->nb[2] == head && int64_t(head) * view->ne[2] <= int64_t(root->nb[1]) &&
         view->ne[1] <= root->ne[1] && view->view_offs % root->nb[1] == 0 &&
         (view->ne[3] == 1 || view->nb[3] == root->nb[2]);
}

}  // namespace

CacheTensor cache_tensor_of(const ggml_tensor* tensor) {
  CacheTensor found;
  if (tensor == nullptr) return found;
  const ggml_tensor* root = tensor->view_src != nullptr ? tensor->view_src : tensor;
  char kind;
  int layer, end = 0;
  if (std::sscanf(root->name, "cache_%c_l%d%n", &kind, &layer, &end) != 2 ||
      root->name[end] != '\0' || (kind != 'k' && kind != 'v') || layer < 0) {
    return found;
  }
  if (root->buffer == nullptr || root->ne[3] != 1 || root->nb[2] != root->nb[1] * root->ne[1]) {
    return found;
  }
  found.root = root, found.is_key = kind == 'k', found.layer = layer;
  return found;
}

bool is_row_write(const ggml_tensor* op) {
  if (op->op != GGML_OP_SET_ROWS) return false;
  const ggml_tensor *rows = op->src[0], *at = op->src[1];
  const CacheTensor cache = cache_tensor_of(op);
  // Of a transposed V the rows are single numbers; nobody reads those here.
  return cache.root != nullptr && at->type == GGML_TYPE_I64 && rows->type == GGML_TYPE_F32 &&
         op->ne[0] == cache.root->ne[0] && op->ne[2] == 1 && op->ne[3] == 1 && rows->ne[2] == 1 &&
         rows->ne[3] == 1 && op->ne[1] == cache.cells() && op->nb[1] == cache.root->nb[1] &&
         op->data == cache.root->data;
}

int64_t written_cell(const ggml_tensor* row_write, int64_t row) {
  const ggml_tensor* at = row_write->src[1];
  int64_t cell;
  std::memcpy(&cell, static_cast<const char*>(at->data) + size_t(row) * at->nb[0], sizeof cell);
  return cell;
}

Attention::Attention(const ggml_tensor* op)
    : q(op->src[0]),
      k(op->src[1]),
      v(op->src[2]),
      mask(op->src[3]),
      sinks(op->src[4]),
      key(cache_tensor_of(k)),
      value(cache_tensor_of(v)) {
  float numbers[3];
  std::memcpy(numbers, op->op_params, sizeof numbers);
  scale = numbers[0], max_bias = numbers[1], softcap = numbers[2];
}

const char* Attention::obstacle() const {
  if (key.root == nullptr || value.root == nullptr || !key.is_key || value.is_key ||
      key.buffer() != value.buffer() || key.layer != value.layer) {
    return "keys and values are not the two halves of a layer's cache";
  }
  if (!host().ggml_backend_buft_is_host(key.buffer()->buft))
    return "the cache is not in host memory";
  if (!is_row_type(k->type) || !is_row_type(v->type)) {
    return "K or V has another type than float16, bfloat16, float32 or q8_0";
  }
  if (key.cells() != value.cells() || key.stream_cells() != value.stream_cells() ||
      !has_rows(k, key) || !has_rows(v, value) || k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] ||
      k->view_offs / key.root->nb[1] != v->view_offs / value.root->nb[1]) {
    return "heads of a token do not lie side by side in the cache";
  }
  if (max_bias != 0) return "logits have a bias by position (ALiBi)";
  if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || q->ne[2] % k->ne[2] != 0 ||
      (sinks != nullptr && (sinks->type != GGML_TYPE_F32 || sinks->ne[0] != q->ne[2]))) {
    return "queries or sinks have another type or shape than those of llama.cpp";
  }
  if (mask == nullptr || mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || mask->nb[0] != 2 ||
      mask->ne[0] != k->ne[1] || (mask->ne[3] != 1 && mask->ne[3] != q->ne[3]) ||
      mask->ne[1] < q->ne[1]) {
    return "there is no mask of a row for each token";
  }
  return nullptr;
}

}  // namespace pariskv::ggml
