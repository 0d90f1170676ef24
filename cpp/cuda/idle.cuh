/** What an idle slot of a step leaves: zeros, and the log-sum-exp of nothing. */
#pragma once

#include "device/softmax.cuh"
#include "tables.h"

namespace pariskv::cuda {

/** Of query heads [first, first + heads) of a slot; all threads of a block. */
template <typename Element>
__device__ __forceinline__ void leave_idle(const StepCall& call, int64_t row, int first,
                                           int heads) {
  const int dim = int(call.shape.rows.value_dim);
  if (call.out.data != nullptr) {
    auto* out = reinterpret_cast<Element*>(call.out.data) + row * call.out.stride_i;
    for (int i = int(threadIdx.x); i < heads * dim; i += int(blockDim.x)) {
      const int head = i / dim;
      out[(first + head) * call.out.stride_j + i - head * dim] = device::from_float<Element>(0);
    }
  }
  if (call.lse == nullptr) return;
  for (int i = int(threadIdx.x); i < heads; i += int(blockDim.x)) {
    call.lse[row * call.lse_stride + first + i] = -device::infinity();
  }
}

}  // namespace pariskv::cuda
