/** How work is cut: threads of a block, parts of a sum, slices of the candidates. */
#pragma once

#include <cstdint>

namespace pariskv::cuda::device {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 16;

/**
 * Sums of floats are cut into this many parts, added in the order of the parts, so that the
 * result is the same whatever the number of blocks: each block has the same number of parts, side
 * by side.
 */
constexpr int kParts = 16;
static_assert(kMaxCluster == kParts);

/** Candidates are estimated in as many slices. */
constexpr int kSlices = 32;

/** Most blocks that score the zone of one head. */
constexpr int kMostScoreBlocks = 32;

__device__ __forceinline__ int slice_begin(int count, int slice) {
  return int(uint32_t(count) * uint32_t(slice) / kSlices);
}

/** Where part `part` of `count` things begins; there are at most 2^23 of them. */
__device__ __forceinline__ int part_begin(int count, int part) {
  return int(uint32_t(count) * uint32_t(part) / kParts);
}

/** Where the share of warp `warp` of `count` things begins. */
__device__ __forceinline__ int warp_begin(int count, int warp) {
  return int(uint32_t(count) * uint32_t(warp) / kWarps);
}

/** Where the share of block `rank` of `blocks` begins, of so many things: shares differ by one. */
__device__ __forceinline__ int share_begin(int count, int rank, int blocks) {
  const uint32_t each = uint32_t(count) / uint32_t(blocks);
  return int(each) * rank + min(rank, int(uint32_t(count) - each * uint32_t(blocks)));
}

}  // namespace pariskv::cuda::device
