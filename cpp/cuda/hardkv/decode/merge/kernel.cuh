/**
 * merge_kept: the parts of a step put together, outputs and log-sum-exps written; and the queries
 * of new tokens, to where they are remembered. A block for each query head, in which a warp has 32
 * dimensions.
 */
#pragma once

#include "hardkv/decode/merge/query.cuh"

namespace pariskv::cuda {

constexpr int kMostMergeThreads = int(kMaxHeadDim);

template <typename Element>
__device__ __forceinline__ void merge_parts(const MergedQuery<Element>& query) {
  constexpr int kAll = kSegments * device::kParts;
  static_assert(kAll == 32, "a lane for each part");
  const KeptContext& context = query.context;
  const int count = context.segments() * device::kParts;
  const int dim = context.shape.value_dim, step = context.shape.group * (2 + dim);
  const int lane = device::lane_id(), d = 32 * query.chunk + lane;
  const float* parts =
      context.parts + (query.query_head - context.head * context.shape.group) * (2 + dim);
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
  query.store(d, weighted, top, sum);
}

template <typename Element>
__global__ void __launch_bounds__(kMostMergeThreads)
    merge_kept(const __grid_constant__ KeptStepParams params) {
  __shared__ KeptContext context;
  __shared__ int found;
  const int query = int(blockIdx.x), group = int(params.call.shape.group);
  if (threadIdx.x == 0) found = find_kept(params, int(params.by_group(query)), context);
  __syncthreads();
  const MergedQuery<Element> merged{params, context, context.head * group + query % group,
                                    device::warp_id()};
  // The kernel before has nothing to do with this. An output may lie where its query lies.
  if (found != 0) merged.remember();
  __syncthreads();
  device::wait_for_predecessor();
  if (found != 0) merge_parts(merged);
}

}  // namespace pariskv::cuda
