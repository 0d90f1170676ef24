/**
 * Exact selection of candidates on small integers: the histograms of all blocks give a threshold,
 * every warp compacts the scores that it made, in index order. Ties go to the lower index.
 */
#pragma once

#include "device/score.cuh"

namespace pariskv::cuda::device {

/** What passes a cut of this block: everything above, and the first `ties` that are equal. */
struct Cut {
  uint32_t threshold;
  int ties;    // of this block that pass
  int offset;  // of this block's first one among all that pass
  int count;   // that pass, in all blocks
};

/** Shared memory of a selection. */
struct SelectSpace {
  int histogram[256];  // of this block; read by the others
  int above[kWarps], equal[kWarps];
  Cut cut;
};

/** Adds the warps' histograms up. Between barriers. */
__device__ __forceinline__ void add_histograms(const uint32_t* of_warps, SelectSpace& space) {
  if (threadIdx.x < 256) {
    int sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += int(of_warps[warp * 256 + threadIdx.x]);
    space.histogram[threadIdx.x] = sum;
  }
}

/**
 * The highest threshold that leaves enough; score 0 marks unusable keys and never passes.
 * @param lower  (2, 256) scratch: counts of all blocks, and of those before this one
 * Between a barrier of the cluster after `add_histograms` and the next one. Ends with a barrier.
 */
__device__ __forceinline__ void find_threshold(const Cluster& cluster, int wanted, int* total,
                                               int* lower, SelectSpace& space) {
  if (threadIdx.x < 256) {
    int all = 0, before = 0;
#pragma unroll 4
    for (int other = 0; other < cluster.size; ++other) {
      const int count = *cluster.of(&space.histogram[threadIdx.x], other);
      all += count;
      if (other < cluster.rank) before += count;
    }
    total[threadIdx.x] = all;
    lower[threadIdx.x] = before;
  }
  __syncthreads();
  if (warp_id() == 0) {
    const int first = 8 * lane_id();
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum += total[first + i];
    const int all = __reduce_add_sync(~0u, sum);
    int reached = all - lanes_before(sum) - sum;  // scores from the bin on, or higher
    int found = 1;
    for (int i = 7; i >= 0; --i) {
      reached += total[first + i];
      if (reached >= wanted && first + i > found) found = first + i;
    }
    const int threshold = __reduce_max_sync(~0u, found);
    int above = 0, above_before = 0;
    for (int i = 0; i < 8; ++i) {
      if (first + i <= threshold) continue;
      above += total[first + i];
      above_before += lower[first + i];
    }
    above = __reduce_add_sync(~0u, above);
    above_before = __reduce_add_sync(~0u, above_before);
    if (lane_id() == 0) {
      const int ties = min(total[threshold], wanted - above);
      const int ties_before = min(lower[threshold], ties);
      space.cut = {uint32_t(threshold), ties - ties_before, above_before + ties_before,
                   above + ties};
    }
  }
  __syncthreads();
}

/** Where a warp's first one lies among those that pass. */
struct Place {
  int offset;
  int ties;  // that may still pass
};

/** From how many of each warp are above and equal. Ends with a barrier. */
__device__ __forceinline__ Place place_of_warp(int above, int equal, SelectSpace& space) {
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

/** Bit i of the result: byte i of the mask `bytes` is set. */
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t bytes) {
  return (bytes & 0x08040201u) * 0x01010101u >> 24 & 15;
}

/**
 * Units [first, end) of this warp compacted.
 * @param scores     from the zone's origin on, or a later unit `scores_unit`
 * @param histogram  (256) of this warp
 * @param out        offsets from the zone's begin, ascending over all warps and blocks
 */
template <int kWords>
__device__ __forceinline__ void compact_scores(const Zone& zone, int first, int end,
                                               const uint8_t* scores, int scores_unit,
                                               const uint32_t* histogram, SelectSpace& space,
                                               int32_t* out) {
  const uint32_t threshold = space.cut.threshold;
  int above = 0;
  for (int i = lane_id(); i < 256; i += 32) above += i > int(threshold) ? int(histogram[i]) : 0;
  above = __reduce_add_sync(~0u, above);
  Place place = place_of_warp(above, int(histogram[threshold]), space);

  const uint32_t word = threshold * 0x01010101u;
  const int begin = first * kUnitKeys<kWords>, stop = end * kUnitKeys<kWords>;
  scores -= int64_t(scores_unit) * kUnitKeys<kWords>;
  const int shift = zone.begin - zone.origin();
#pragma unroll 1
  for (int at = begin + 16 * lane_id(); at - 16 * lane_id() < stop; at += 512) {
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (at < stop) packed = *reinterpret_cast<const uint4*>(scores + at);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    uint32_t above_bits = 0, equal_bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t passes = __vcmpgeu4(words[i], word), equals = __vcmpeq4(words[i], word);
      above_bits |= bits_of_bytes(passes & ~equals) << 4 * i;
      equal_bits |= bits_of_bytes(equals) << 4 * i;
    }
    // Both counts in one number: neither passes 512 within a step.
    const int counts = __popc(above_bits) | __popc(equal_bits) << 16;
    const int before = lanes_before(counts);
    const int equal_before = before >> 16;
    int room = max(place.ties - equal_before, 0);
    int index = place.offset + (before & 0xffff) + min(equal_before, place.ties);
    uint32_t take = above_bits;
    if (equal_bits != 0 && room > 0) {
      uint32_t ties = equal_bits;
      for (int extra = __popc(ties) - room; extra > 0; --extra) ties ^= 1u << (31 - __clz(ties));
      take |= ties;
    }
    while (take != 0) {
      const int offset = at + __ffs(take) - 1 - shift;
      take &= take - 1;
      out[index++] = offset;
      // The rerank reads these soon.
      const Slot slot = slot_of(zone, zone.begin + offset);
      prefetch_to_l2(slot.block + zone.layout.records(zone.head, slot.slot));
      prefetch_to_l2(slot.block + zone.layout.scales(zone.head, slot.slot));
      prefetch_to_l2(slot.block + zone.layout.signs(zone.head, slot.slot));
    }
    const int all = __shfl_sync(~0u, before + counts, 31);
    const int taken = min(all >> 16, place.ties);
    place.offset += (all & 0xffff) + taken;
    place.ties -= taken;
  }
}

/** The histogram of units [first, end) of this warp, when their scores come from an earlier launch.
 */
template <int kWords>
__device__ __forceinline__ void count_scores(const uint8_t* scores, int first, int end,
                                             uint32_t* histogram) {
  const int stop = end * kUnitKeys<kWords>;
  for (int at = first * kUnitKeys<kWords> + 4 * lane_id(); at < stop; at += 128) {
    const uint32_t four = *reinterpret_cast<const uint32_t*>(scores + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(&histogram[four >> 8 * i & 255], 1);
  }
}

}  // namespace pariskv::cuda::device
