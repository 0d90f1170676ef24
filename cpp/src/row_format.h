/** A row, which is what is stored of a token and kv head: K (key_dim), then V (value_dim). */
#pragma once

#include <cstdint>

#include "pariskv/tensor_view.h"

namespace pariskv {

struct RowFormat {
  int64_t key_dim;
  int64_t value_dim;
  DType dtype;

  constexpr int64_t elements() const { return key_dim + value_dim; }
  constexpr int64_t key_bytes() const { return key_dim * size_of(dtype); }
  constexpr int64_t value_bytes() const { return value_dim * size_of(dtype); }
  constexpr int64_t bytes() const { return key_bytes() + value_bytes(); }
};

}  // namespace pariskv
