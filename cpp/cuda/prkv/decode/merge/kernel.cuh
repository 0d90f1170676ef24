/**
 * merge_pages: the parts of a step put together, outputs and log-sum-exps written; and the queries
 * of new tokens, to where they are remembered. A block for each query head, in which a warp has 32
 * dimensions.
 */
#pragma once

#include "kept/decode/merge/parts.cuh"
#include "prkv/decode/context.cuh"

namespace pariskv::cuda {

/** @param fetched  parts of rows of pages, if any page was found */
template <typename Element>
__device__ __forceinline__ void merge_parts(const MergedQuery<Element>& query, const float* fetched,
                                            const int32_t* found) {
  const KeptContext& context = query.context;
  const int dim = context.shape.value_dim, step = context.shape.group * (2 + dim);
  const int first = (query.query_head - context.head * context.shape.group) * (2 + dim);
  const int d = 32 * query.chunk + device::lane_id();
  const PartsOfLane<kMostParts> kept(context.parts + first, context.part_count<Element>(), step, d,
                                     d < dim);
  // Asked for before it is known whether they count: one trip to memory.
  PartsOfLane<device::kParts> pages(fetched + first, device::kParts, step, d, d < dim);
  if (__ldcg(found) == 0) pages.clear();
  const float top = device::warp_max(fmaxf(kept.top(), pages.top()));
  float sum = 0, weighted = 0;
  kept.add_sums(top, sum);
  pages.add_sums(top, sum);
  sum = device::warp_sum(sum);
  kept.add_values(top, weighted);
  pages.add_values(top, weighted);
  query.store(d, weighted, top, sum);
}

template <typename Element>
__global__ void __launch_bounds__(int(kMaxHeadDim))
    merge_pages(const __grid_constant__ PageMergeParams params) {
  __shared__ KeptContext context;
  __shared__ int found;
  const int query = int(blockIdx.x), group = int(params.kept.call.shape.group);
  if (threadIdx.x == 0) found = find_kept(params.kept, int(params.kept.by_group(query)), context);
  __syncthreads();
  if (found == 0) {
    device::wait_for_predecessor();
    return leave_idle_query<Element>(params.kept, query);
  }
  const MergedQuery<Element> merged{params.kept, context, context.head * group + query % group,
                                    device::warp_id()};
  // The kernels before have nothing to do with this. An output may lie where its query lies.
  merged.remember();
  // The parts of resident and kept rows come first in a head's scratch.
  const PageScratch scratch = page_scratch(params.scratch, reinterpret_cast<char*>(context.parts),
                                           params.kept.call.slots[context.row].page_capacity);
  __syncthreads();
  device::wait_for_predecessor();
  merge_parts(merged, scratch.fetched, &scratch.search->found);
}

}  // namespace pariskv::cuda
