/**
 * merge_kept: the parts of a step put together, outputs and log-sum-exps written; and the queries
 * of new tokens, to where they are remembered. A block for each query head, in which a warp has 32
 * dimensions.
 */
#pragma once

#include "device/signal.cuh"
#include "device/softmax.cuh"
#include "hardkv/decode/context.cuh"
#include "kept/remember/query.cuh"

namespace pariskv::cuda {

constexpr int kMostMergeThreads = int(kMaxHeadDim);

template <typename Element>
struct MergeKept {
  const KeptStepParams& params;
  const KeptContext& context;
  int query_head, chunk;

  __device__ __forceinline__ Element* at(const Rows& tensor) const {
    return reinterpret_cast<Element*>(tensor.data) + context.row * tensor.stride_i +
           query_head * tensor.stride_j;
  }

  __device__ __forceinline__ void remember() const {
    if (params.call.k.data == nullptr || chunk != 0) return;
    device::remember_query(at(params.call.q), params.call.logits.scale, params.most_steps,
                           params.call.shape.recent_queries(), context.recent, context.total - 1,
                           query_head);
  }

  __device__ __forceinline__ void merge() const {
    const KeptDecodeCall& call = params.call;
    constexpr int kAll = kSegments * device::kParts;
    static_assert(kAll == 32, "a lane for each part");
    const int count = context.segments() * device::kParts;
    const int dim = context.shape.value_dim, step = context.shape.group * (2 + dim);
    const int lane = device::lane_id(), d = 32 * chunk + lane;
    const float* parts =
        context.parts + (query_head - context.head * context.shape.group) * (2 + dim);
    const float maximum = lane < count ? __ldcg(parts + lane * step) : -device::infinity();
    const float own = lane < count ? __ldcg(parts + lane * step + 1) : 0.0f;
    float values[kAll] = {};
#pragma unroll
    for (int part = 0; part < kAll; ++part) {
      if (part < count && d < dim) values[part] = __ldcg(parts + part * step + 2 + d);
    }
    const float top = device::warp_max(maximum);
    const float factor = maximum == -device::infinity() ? 0.0f : device::exp_of(maximum - top);
    const float sum = device::warp_sum(own * factor);
    float weighted = 0;
#pragma unroll
    for (int part = 0; part < kAll; ++part) {
      weighted = __fmaf_rn(__shfl_sync(~0u, factor, part), values[part], weighted);
    }
    const float rows = device::log_of_sum(top, sum);
    float lse = rows;
    if (call.logits.sink_bias != nullptr) {
      lse = device::log_add(lse, call.logits.sink_bias[query_head]);
    }
    // The share of all attention that e^top stands for; nothing seen leaves zeros.
    const bool none = lse == -device::infinity() || top == -device::infinity();
    const float share = none ? 0.0f : __fdiv_rn(expf(rows - lse), sum);
    if (call.out.data != nullptr && d < dim) {
      at(call.out)[d] = device::from_float<Element>(weighted * share);
    }
    if (call.lse != nullptr && d == 0) call.lse[context.row * call.lse_stride + query_head] = lse;
  }
};

template <typename Element>
__global__ void __launch_bounds__(kMostMergeThreads)
    merge_kept(const __grid_constant__ KeptStepParams params) {
  __shared__ KeptContext context;
  __shared__ int found;
  const int query = int(blockIdx.x), group = int(params.call.shape.group);
  if (threadIdx.x == 0) found = find_kept(params, int(params.by_group(query)), context);
  __syncthreads();
  const MergeKept<Element> merge{params, context, context.head * group + query % group,
                                 device::warp_id()};
  // The kernel before has nothing to do with this. An output may lie where its query lies.
  if (found != 0) merge.remember();
  __syncthreads();
  device::wait_for_predecessor();
  if (found != 0) merge.merge();
}

}  // namespace pariskv::cuda
