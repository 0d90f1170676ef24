/** A query head in a kernel that puts the parts of a step together: its beginning and its end. */
#pragma once

#include "device/signal.cuh"
#include "device/softmax.cuh"
#include "hardkv/decode/context.cuh"
#include "kept/remember/query.cuh"

namespace pariskv::cuda {

/** A block has a query head, and a warp of it 32 dimensions. */
template <typename Element>
struct MergedQuery {
  const KeptStepParams& params;
  const KeptContext& context;
  int query_head, chunk;

  __device__ __forceinline__ Element* at(const Rows& tensor) const {
    return reinterpret_cast<Element*>(tensor.data) + context.row * tensor.stride_i +
           query_head * tensor.stride_j;
  }

  /** The query of a new token goes where it is remembered. */
  __device__ __forceinline__ void remember() const {
    if (params.call.k.data == nullptr || chunk != 0 || context.recent == nullptr) return;
    device::remember_query(at(params.call.q), params.call.logits.scale, params.most_steps,
                           params.call.shape.recent_queries(), context.recent, context.total - 1,
                           query_head);
  }

  /**
   * Writes output and log-sum-exp.
   * @param weighted  what dimension d of the values adds up to, in units of e^top, as `sum` is
   */
  __device__ __forceinline__ void store(int d, float weighted, float top, float sum) const {
    const KeptDecodeCall& call = params.call;
    const float rows = device::log_of_sum(top, sum);
    float lse = rows;
    if (call.logits.sink_bias != nullptr) {
      lse = device::log_add(lse, call.logits.sink_bias[query_head]);
    }
    // The share of all attention that e^top stands for.
    const float share = __fdiv_rn(expf(rows - lse), sum);
    if (call.out.data != nullptr && d < context.shape.value_dim) {
      at(call.out)[d] = device::from_float<Element>(weighted * share);
    }
    if (call.lse != nullptr && d == 0) call.lse[context.row * call.lse_stride + query_head] = lse;
  }
};

}  // namespace pariskv::cuda
