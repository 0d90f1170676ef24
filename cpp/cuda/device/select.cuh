/**
 * Exact selection of candidates on small integers: what all scans have counted gives a threshold,
 * and a block compacts the scores among which its slice of the candidates lies, in index order.
 * Ties go to the lower index.
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

/** Bytes of a word that are at least `least`: bit 7 of each. */
struct AtLeast {
  uint32_t add;   // what carries into bit 7 where the lower bits are enough
  uint32_t high;  // all ones: bit 7 of `least` is set, and so must a byte's be

  __device__ __forceinline__ explicit AtLeast(uint32_t least)
      : add((128 - least % 128) * 0x01010101u), high(least >= 128 ? ~0u : 0) {}
  __device__ __forceinline__ uint32_t of(uint32_t word) const {
    const uint32_t low = (word & 0x7f7f7f7fu) + add;
    return ((word & low) | ((word | low) & ~high)) & 0x80808080u;
  }
};

/** Bit i of the result: bit 7 of byte i. */
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t bytes) {
  return (bytes >> 7) * 0x10204080u >> 28;
}

constexpr int kFine = 16;  // bins of scores that are looked at together

/** What a scan leaves: how many scores are at least b, for every b, and again for each 16th. */
struct ScanCounts {
  int32_t at_least[256];
  int32_t coarse[kFine];
};

/** Turns a histogram into counts. The first warp. */
__device__ __forceinline__ void write_counts(const uint32_t* histogram, ScanCounts* out) {
  const int first = 8 * lane_id();
  int of[8], sum = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) of[i] = sum += int(histogram[first + i]);
  const int higher = __reduce_add_sync(~0u, sum) - lanes_before(sum) - sum;
#pragma unroll
  for (int i = 0; i < 8; ++i) of[i] += higher;
  auto* to = reinterpret_cast<int4*>(out->at_least + first);
  to[0] = make_int4(of[0], of[1], of[2], of[3]);
  to[1] = make_int4(of[4], of[5], of[6], of[7]);
  if (lane_id() % 2 == 0) out->coarse[lane_id() / 2] = of[0];
}

/** What the scans of a head left to be known of its scores. */
struct ScoreSpace {
  int counts[2][kMostScans][kFine + 1];  // at least: each 16th score, then 16 scores and the next
  int sums[2][kWarps][kFine];
  int above[kMostScans + 1], equal[kMostScans + 1];  // of the scans before; the last is all
  int in_warp[2][kWarps];
  int threshold, ties, count;
};

/**
 * Counts of 16 scores from all scans, and their sums over the scans: in lane b that of score b.
 * @param counts  (scans, ...) of one scan sizeof(ScanCounts) apart; null from `scans` on
 */
__device__ __forceinline__ int add_scans(const int32_t* counts, int scans, int (*kept)[kFine + 1],
                                         int (*sums)[kFine]) {
  static_assert(kThreads == 8 * kMostScans);
  const int scan = int(threadIdx.x) / 8, first = 2 * (int(threadIdx.x) % 8);
  int2 pair = make_int2(0, 0);
  if (scan < scans) {
    pair = __ldcg(reinterpret_cast<const int2*>(
        counts + scan * int(sizeof(ScanCounts) / sizeof(int32_t)) + first));
  }
  kept[scan][first] = pair.x;
  kept[scan][first + 1] = pair.y;
#pragma unroll
  for (int step = 8; step < 32; step *= 2) {
    pair.x += __shfl_xor_sync(~0u, pair.x, step);
    pair.y += __shfl_xor_sync(~0u, pair.y, step);
  }
  if (lane_id() < 8) {
    sums[warp_id()][first] = pair.x;
    sums[warp_id()][first + 1] = pair.y;
  }
  __syncthreads();
  int sum = 0;
  if (lane_id() < kFine) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][lane_id()];
  }
  return sum;
}

/**
 * The highest threshold that leaves enough; score 0 marks unusable keys and never passes. Ties are
 * taken from the lowest index on. All threads; ends with a barrier.
 */
__device__ __forceinline__ void find_threshold(const ScanCounts* counts, int scans, int wanted,
                                               ScoreSpace& space) {
  // Every warp finds the same.
  int sum = add_scans(counts->coarse, scans, space.counts[0], space.sums[0]);
  const int coarse = 31 - __clz(__ballot_sync(~0u, lane_id() < kFine && sum >= wanted) | 1);
  const int next_sum = __shfl_sync(~0u, sum, coarse + 1);
  const int next = coarse + 1 < kFine ? next_sum : 0;  // scores of the next 16 on
  sum = add_scans(counts->at_least + kFine * coarse, scans, space.counts[1], space.sums[1]);
  int fine = 31 - __clz(__ballot_sync(~0u, lane_id() < kFine && sum >= wanted) | 1);
  if (coarse == 0 && fine == 0) fine = 1;
  const int reached = __shfl_sync(~0u, sum, fine), higher = __shfl_sync(~0u, sum, fine + 1);
  const int above = fine + 1 < kFine ? higher : next;
  if (warp_id() == 0) {
    const int scan = lane_id();
    const int mine = fine + 1 < kFine     ? space.counts[1][scan][fine + 1]
                     : coarse + 1 < kFine ? space.counts[0][scan][coarse + 1]
                                          : 0;
    const int equal = space.counts[1][scan][fine] - mine;
    space.above[scan + 1] = lanes_before(mine) + mine;
    space.equal[scan + 1] = lanes_before(equal) + equal;
    if (scan == 0) {
      space.above[0] = space.equal[0] = 0;
      space.threshold = kFine * coarse + fine;
      space.ties = min(reached - above, wanted - above);
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
  const uint32_t threshold = uint32_t(space.threshold);
  const AtLeast reaches(threshold), passes(min(threshold + 1, 255u));
  const uint32_t any = threshold == 255 ? 0 : ~0u;  // scores above it exist
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
      const uint32_t above = passes.of(words[i]) & any;
      above_bits |= bits_of_bytes(above) << 4 * i;
      equal_bits |= bits_of_bytes(reaches.of(words[i]) & ~above) << 4 * i;
    }
    // Both counts in one number: a step has 4096 keys.
    const int counts = __popc(above_bits) | __popc(equal_bits) << 16;
    const int in_lanes = lanes_before(counts);
    if (lane_id() == 31) space.in_warp[turn][warp_id()] = in_lanes + counts;
    __syncthreads();
    const int of_warp = lane_id() < kWarps ? space.in_warp[turn][lane_id()] : 0;
    const int all = __reduce_add_sync(~0u, of_warp);
    const int before = in_lanes + __reduce_add_sync(~0u, lane_id() < warp_id() ? of_warp : 0);
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
