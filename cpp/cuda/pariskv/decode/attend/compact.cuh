/** What passes a cut of the top k, over the blocks of a cluster and the warps of a block. */
#pragma once

#include "device/partition.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** What passes a cut of this block: everything above, and the first `ties` that are equal. */
struct Cut {
  uint32_t threshold;
  int ties;    // of this block that pass
  int offset;  // of this block's first one among all that pass
  int count;   // that pass, in all blocks
};

/** Shared memory of a compaction. */
struct CompactSpace {
  int above[kWarps], equal[kWarps];
  Cut cut;
};

/** Where a warp's first one lies among those that pass. */
struct Place {
  int offset;
  int ties;  // that may still pass
};

/** From how many of each warp are above and equal. Ends with a barrier. */
__device__ __forceinline__ Place place_of_warp(int above, int equal, CompactSpace& space) {
  if (lane_id() == 0) {
    space.above[warp_id()] = above;
    space.equal[warp_id()] = equal;
  }
  __syncthreads();
  const bool before = lane_id() < warp_id();
  const int above_before = __reduce_add_sync(~0u, before ? space.above[lane_id()] : 0);
  const int equal_before = __reduce_add_sync(~0u, before ? space.equal[lane_id()] : 0);
  const int taken = min(equal_before, space.cut.ties);
  return {space.cut.offset + above_before + taken, space.cut.ties - taken};
}

}  // namespace pariskv::cuda::device
