/**
 * Exact selection of candidates on small integers: the histograms of all blocks give a threshold,
 * every warp compacts the scores that it made, in index order. Ties go to the lower index.
 */
#pragma once

#include "device/score.cuh"

namespace pariskv::cuda::device {

/** Most blocks that scan the zone of one head. */
constexpr int kMostScans = 32;

/** What passes a cut of this block: everything above, and the first `ties` that are equal. */
struct Cut {
  uint32_t threshold;
  int ties;    // of this block that pass
  int offset;  // of this block's first one among all that pass
  int count;   // that pass, in all blocks
};

/** Shared memory of a compaction. */
struct SelectSpace {
  int above[kWarps], equal[kWarps];
  Cut cut;
};

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

/** What the scans of a head left to be known of its scores. */
struct ScoreSpace {
  int histogram[kMostScans][256];  // of every scan
  int total[256];
  int above[kMostScans + 1], equal[kMostScans + 1];  // of the scans before; the last is all
  int in_warp[2][kWarps];
  int threshold, ties, count;
};

/**
 * The highest threshold that leaves enough; score 0 marks unusable keys and never passes. Ties are
 * taken from the lowest index on. All threads; ends with a barrier.
 * @param histograms  (scans, 256)
 */
__device__ __forceinline__ void find_threshold(const int32_t* histograms, int scans, int wanted,
                                               ScoreSpace& space) {
  static_assert(kThreads == 256);
  int total = 0;
#pragma unroll 8
  for (int scan = 0; scan < scans; ++scan) {
    const int count = __ldcg(histograms + 256 * scan + threadIdx.x);
    space.histogram[scan][threadIdx.x] = count;
    total += count;
  }
  space.total[threadIdx.x] = total;
  __syncthreads();
  // Every warp finds the same.
  const int first = 8 * lane_id();
  int sum = 0, of[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += of[i] = space.total[first + i];
  const int all = __reduce_add_sync(~0u, sum);
  int reached = all - lanes_before(sum) - sum;  // scores from a bin on, or higher
  int found = 1;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    reached += of[i];
    if (reached >= wanted && first + i > found) found = first + i;
  }
  const int threshold = __reduce_max_sync(~0u, found);
  const auto above_in = [&](const int* counts) {
    int above = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) above += first + i > threshold ? counts[first + i] : 0;
    return __reduce_add_sync(~0u, above);
  };
  const int above = above_in(space.total);
  for (int scan = warp_id(); scan < scans; scan += kWarps) {
    const int above_of_scan = above_in(space.histogram[scan]);
    if (lane_id() == 0) {
      space.above[scan] = above_of_scan;
      space.equal[scan] = space.histogram[scan][threshold];
    }
  }
  __syncthreads();
  if (warp_id() == 0) {
    const bool has = lane_id() < scans;
    const int mine = has ? space.above[lane_id()] : 0, equal = has ? space.equal[lane_id()] : 0;
    const int above_before = lanes_before(mine), equal_before = lanes_before(equal);
    __syncwarp();
    if (has) {
      space.above[lane_id() + 1] = above_before + mine;
      space.equal[lane_id() + 1] = equal_before + equal;
    }
    if (lane_id() == 0) {
      space.above[0] = space.equal[0] = 0;
      space.threshold = threshold;
      space.ties = min(space.total[threshold], wanted - above);
      space.count = above + space.ties;
    }
  }
  __syncthreads();
}

/**
 * Candidates [first, last) of the head from the scores of one scan, by a block.
 * @param scores  from the zone's origin on
 * @param begin   of the scan's keys, `end` too; counted from the zone's origin
 * @param take    take(index, offset): candidate `index`, `offset` from the zone's begin
 */
template <typename Take>
__device__ __forceinline__ void compact_scores(const uint8_t* scores, int begin, int end, int scan,
                                               int shift, int first, int last, ScoreSpace& space,
                                               Take take) {
  const uint32_t threshold = uint32_t(space.threshold), word = threshold * 0x01010101u;
  const int ties = space.ties;
  int above_before = space.above[scan], equal_before = space.equal[scan];
  int turn = 0;
  uint4 next = make_uint4(0, 0, 0, 0);
  const auto load = [&](int at) {
    return at < end ? __ldcg(reinterpret_cast<const uint4*>(scores + at)) : make_uint4(0, 0, 0, 0);
  };
  next = load(begin + 16 * int(threadIdx.x));
#pragma unroll 1
  for (int base = begin; base < end; base += 16 * kThreads, turn ^= 1) {
    const int at = base + 16 * int(threadIdx.x);
    const uint32_t words[4] = {next.x, next.y, next.z, next.w};
    next = load(at + 16 * kThreads);
    uint32_t above_bits = 0, equal_bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t passes = __vcmpgeu4(words[i], word), equals = __vcmpeq4(words[i], word);
      above_bits |= bits_of_bytes(passes & ~equals) << 4 * i;
      equal_bits |= bits_of_bytes(equals) << 4 * i;
    }
    // Both counts in one number: a step has 4096 keys.
    const int counts = __popc(above_bits) | __popc(equal_bits) << 16;
    const int in_lanes = lanes_before(counts);
    if (lane_id() == 31) space.in_warp[turn][warp_id()] = in_lanes + counts;
    __syncthreads();
    int before = in_lanes, all = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int of_warp = space.in_warp[turn][warp];
      if (warp < warp_id()) before += of_warp;
      all += of_warp;
    }
    const int above = above_before + (before & 0xffff), equal = equal_before + (before >> 16);
    above_before += all & 0xffff;
    equal_before += all >> 16;
    int room = max(ties - equal, 0);
    int index = above + min(equal, ties);
    uint32_t passing = above_bits;
    if (equal_bits != 0 && room > 0) {
      uint32_t tied = equal_bits;
      for (int extra = __popc(tied) - room; extra > 0; --extra) tied ^= 1u << (31 - __clz(tied));
      passing |= tied;
    }
    while (passing != 0) {
      const int offset = at + __ffs(passing) - 1 - shift;
      passing &= passing - 1;
      if (index >= first && index < last) take(index, offset);
      ++index;
    }
    if (above_before + min(equal_before, ties) >= last) break;
  }
}

}  // namespace pariskv::cuda::device
