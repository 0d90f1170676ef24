/**
 * merge_kept: the parts of a step put together, outputs and log-sum-exps written; and the queries
 * of new tokens, to where they are remembered. A block for each query head, in which a warp has 32
 * dimensions.
 */
#pragma once

#include "kept/decode/merge/parts.cuh"

namespace pariskv::cuda {

constexpr int kMostMergeThreads = int(kMaxHeadDim);

template <typename Element>
__device__ __forceinline__ void merge_parts(const MergedQuery<Element>& query) {
  const KeptContext& context = query.context;
  const int dim = context.shape.value_dim, step = context.shape.group * (2 + dim);
  const int d = 32 * query.chunk + device::lane_id();
  const int first = (query.query_head - context.head * context.shape.group) * (2 + dim);
  const PartsOfLane<kMostParts> parts(context.parts + first, context.part_count<Element>(), step, d,
                                      d < dim);
  const float top = device::warp_max(parts.top());
  float sum = 0, weighted = 0;
  parts.add_sums(top, sum);
  sum = device::warp_sum(sum);
  parts.add_values(top, weighted);
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
  if (found != 0) {
    merge_parts(merged);
  } else {
    leave_idle_query<Element>(params, query);
  }
}

}  // namespace pariskv::cuda
