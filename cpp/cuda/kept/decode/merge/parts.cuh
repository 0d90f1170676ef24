/** Parts of the attention of a query head, put together by a warp that has 32 dimensions. */
#pragma once

#include "device/signal.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "idle.cuh"
#include "kept/decode/context.cuh"
#include "kept/remember/query.cuh"

namespace pariskv::cuda {

/** Parts of one kind: a lane has maxima and sums of some, and a dimension of all. */
template <int kMost>
struct PartsOfLane {
  static constexpr int kTurns = (kMost + 31) / 32;  // parts whose maximum a lane has
  float maximum[kTurns], sums[kTurns];
  float values[kMost];

  /**
   * @param parts  the first of `count`, `step` floats apart
   * @param d      this lane's dimension, if it `exists`
   */
  __device__ __forceinline__ PartsOfLane(const float* parts, int count, int step, int d,
                                         bool exists) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int part = 32 * i + device::lane_id();
      maximum[i] = part < count ? __ldcg(parts + part * step) : -device::infinity();
      sums[i] = part < count ? __ldcg(parts + part * step + 1) : 0.0f;
    }
#pragma unroll
    for (int part = 0; part < kMost; ++part) {
      values[part] = part < count && exists ? __ldcg(parts + part * step + 2 + d) : 0.0f;
    }
  }

  /** Nothing was seen. */
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) maximum[i] = -device::infinity(), sums[i] = 0;
#pragma unroll
    for (float& value : values) value = 0;
  }
  /** Of this lane's parts. */
  __device__ __forceinline__ float top() const {
    float top = maximum[0];
#pragma unroll
    for (int i = 1; i < kTurns; ++i) top = fmaxf(top, maximum[i]);
    return top;
  }
  /** This lane's parts in units of e^top: `sum` is added to. */
  __device__ __forceinline__ void add_sums(float top, float& sum) const {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) sum = __fmaf_rn(sums[i], factor(i, top), sum);
  }
  /** All parts of this lane's dimension. */
  __device__ __forceinline__ void add_values(float top, float& weighted) const {
    float factors[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) factors[i] = factor(i, top);
#pragma unroll
    for (int part = 0; part < kMost; ++part) {
      weighted = __fmaf_rn(__shfl_sync(~0u, factors[part / 32], part % 32), values[part], weighted);
    }
  }

 private:
  __device__ __forceinline__ float factor(int i, float top) const {
    return maximum[i] == -device::infinity() ? 0.0f : device::exp_of(maximum[i] - top);
  }
};

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
    // The share of all attention that e^top stands for; nothing seen leaves zeros.
    const bool none = lse == -device::infinity() || top == -device::infinity();
    const float share = none ? 0.0f : __fdiv_rn(expf(rows - lse), sum);
    if (call.out.data != nullptr && d < context.shape.value_dim) {
      at(call.out)[d] = device::from_float<Element>(device::finite_or_nan(weighted * share));
    }
    if (call.lse != nullptr && d == 0) call.lse[context.row * call.lse_stride + query_head] = lse;
  }
};

/** A query head of a slot that is idle, by its number in the batch; all threads of a block. */
template <typename Element>
__device__ __forceinline__ void leave_idle_query(const KeptStepParams& params, int query) {
  const int heads = int(params.call.shape.query_heads());
  leave_idle<Element>(params.call, query / heads, query % heads, 1);
}

}  // namespace pariskv::cuda
