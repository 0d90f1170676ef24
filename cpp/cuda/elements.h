/** From the element type and size of rows to instances of kernels. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dispatch.h"

namespace pariskv::cuda {

/** visit(Element{}) */
template <typename Visit>
auto dispatch_element(DType dtype, Visit&& visit) {
  return dispatch(dtype, [&](auto type) {
    if constexpr (type == DType::kFloat32) {
      return visit(float{});
    } else if constexpr (type == DType::kFloat16) {
      return visit(__half{});
    } else {
      return visit(__nv_bfloat16{});
    }
  });
}

/** Key dimensions that a step's kernels are compiled for: a key is taken as the next of them. */
using WarpDims = Sizes<64, 128, 256, 512>;

/** visit(Constant<kWords>{}): the dimensions of a key that each lane of a warp has. */
template <typename Visit>
auto dispatch_words(int64_t key_dim, Visit&& visit) {
  return dispatch(WarpDims{}, least_of(WarpDims{}, key_dim),
                  [&](auto dim) { return visit(Constant<decltype(dim)::kValue / 32>{}); });
}

}  // namespace pariskv::cuda
