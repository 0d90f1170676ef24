/** From a DType to the type that kernels know. */
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

}  // namespace pariskv::cuda
