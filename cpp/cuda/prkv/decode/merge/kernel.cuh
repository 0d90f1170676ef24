/**
 * merge_pages: the parts of a step put together, outputs and log-sum-exps written; and the queries
 * of new tokens, to where they are remembered. A block for each query head, in which a warp has 32
 * dimensions.
 */
#pragma once

#include "hardkv/decode/merge/query.cuh"
#include "prkv/decode/context.cuh"

namespace pariskv::cuda {

/** Parts of one kind: a lane has the maximum and the sum of one, and all lanes their values. */
struct PartsOfLane {
  const float* parts;
  int count, step;  // from part to part
  float maximum, sum;

  __device__ __forceinline__ PartsOfLane(const float* first, int parts_there, int floats)
      : parts(first), count(parts_there), step(floats) {
    const int lane = device::lane_id();
    maximum = lane < count ? __ldcg(parts + lane * step) : -device::infinity();
    sum = lane < count ? __ldcg(parts + lane * step + 1) : 0.0f;
  }
  /** Of dimension d. */
  template <int kCount>
  __device__ __forceinline__ void load(int d, bool exists, float (&values)[kCount]) const {
#pragma unroll
    for (int part = 0; part < kCount; ++part) {
      values[part] = part < count && exists ? __ldcg(parts + part * step + 2 + d) : 0.0f;
    }
  }
  __device__ __forceinline__ float factor(float top) const {
    return maximum == -device::infinity() ? 0.0f : device::exp_of(maximum - top);
  }
};

/** @param fetched  parts of rows of pages, if any page was found */
template <typename Element>
__device__ __forceinline__ void merge_parts(const MergedQuery<Element>& query, const float* fetched,
                                            const int32_t* found) {
  constexpr int kKept = kSegments * device::kParts;
  const KeptContext& context = query.context;
  const int dim = context.shape.value_dim, step = context.shape.group * (2 + dim);
  const int first = (query.query_head - context.head * context.shape.group) * (2 + dim);
  const int d = 32 * query.chunk + device::lane_id();
  const PartsOfLane kept(context.parts + first, context.segments() * device::kParts, step);
  // Asked for before it is known whether they count: one trip to memory.
  PartsOfLane pages(fetched + first, device::kParts, step);
  float of_kept[kKept], of_pages[device::kParts];
  kept.load(d, d < dim, of_kept);
  pages.load(d, d < dim, of_pages);
  if (__ldcg(found) == 0) {
    pages.maximum = -device::infinity(), pages.sum = 0;
#pragma unroll
    for (float& value : of_pages) value = 0;
  }
  const float top = device::warp_max(fmaxf(kept.maximum, pages.maximum));
  const float kept_factor = kept.factor(top), page_factor = pages.factor(top);
  const float sum = device::warp_sum(__fmaf_rn(pages.sum, page_factor, kept.sum * kept_factor));
  float weighted = 0;
#pragma unroll
  for (int part = 0; part < kKept; ++part) {
    weighted = __fmaf_rn(__shfl_sync(~0u, kept_factor, part), of_kept[part], weighted);
  }
#pragma unroll
  for (int part = 0; part < device::kParts; ++part) {
    weighted = __fmaf_rn(__shfl_sync(~0u, page_factor, part), of_pages[part], weighted);
  }
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
  if (found == 0) return device::wait_for_predecessor();
  const MergedQuery<Element> merged{params.kept, context, context.head * group + query % group,
                                    device::warp_id()};
  // The kernels before have nothing to do with this. An output may lie where its query lies.
  merged.remember();
  // The parts of resident and kept rows come first in a head's scratch.
  const PageScratch scratch = page_scratch(params.scratch, reinterpret_cast<char*>(context.parts),
                                           params.kept.call.lanes[context.row].zone_capacity);
  __syncthreads();
  device::wait_for_predecessor();
  merge_parts(merged, scratch.fetched, &scratch.search->found);
}

}  // namespace pariskv::cuda
