/** What a query head is given, from the maximum and the sums of a softmax. */
#pragma once

#include "device/softmax.cuh"
#include "pariskv/decode/call.h"

namespace pariskv::cuda {

template <typename Element>
struct Output {
  const DecodeCall& call;
  int64_t row, query_head;

  /**
   * What weighted values are to be multiplied with. The sink bias has its share, too; the
   * log-sum-exp is written by who `notes` it.
   * @param also  a second place for it; null: none
   */
  __device__ __forceinline__ float share_of(float maximum, float sum, bool notes,
                                            float* also = nullptr) const {
    const float rows = device::log_of_sum(maximum, sum);
    float lse = rows;
    if (call.logits.sink_bias != nullptr) {
      lse = device::log_add(lse, call.logits.sink_bias[query_head]);
    }
    if (call.lse != nullptr && notes) call.lse[row * call.lse_stride + query_head] = lse;
    if (also != nullptr && notes) *also = lse;
    // The share of all attention that e^maximum stands for; nothing seen leaves zeros. Of huge
    // logits the log-sum-exp has no place for the logarithm of the sum.
    const bool none = lse == -device::infinity() || maximum == -device::infinity();
    return none ? 0.0f : __fdiv_rn(expf(rows - lse), sum);
  }

  /** Dimension `d` of the output. */
  __device__ __forceinline__ void give(int d, float x) const {
    if (call.out.data == nullptr) return;
    auto* out = reinterpret_cast<Element*>(call.out.data) + row * call.out.stride_i +
                query_head * call.out.stride_j;
    out[d] = device::from_float<Element>(device::finite_or_nan(x));
  }
};

}  // namespace pariskv::cuda
