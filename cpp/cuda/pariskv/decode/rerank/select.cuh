/**
 * Exact selection of candidates on small integers: the counts of the blocks that score give a
 * threshold, and a block compacts the scores among which its slice of the candidates lies, in index
 * order. Ties go to the lower index.
 */
#pragma once

#include "device/warp.cuh"
#include "pariskv/decode/sums.cuh"

namespace pariskv::cuda::device {

/** Words of 16 scores that a thread looks at in one step, at most. */
constexpr int kMostWords = 11;

/** Counts of the blocks that score a head. */
struct ThresholdSpace {
  int counts[2][kMostScoreBlocks]
            [kFine + 1];  // at least: each 16th score, then 16 scores and the next
  int sums[2][kWarps][kFine];
  int above[kMostScoreBlocks + 1],
      equal[kMostScoreBlocks + 1];  // of the blocks before; the last is all
  int in_warp[2][kWarps];
  int threshold, ties, count;
  // Of each warp, the words of scores that reach the threshold, and where they lie.
  alignas(16) uint4 word[kWarps][32 * kMostWords];
  int32_t position[kWarps][32 * kMostWords];
};

/** Some scores of a head among which candidates lie, and how many lie before them. */
struct ScoreRange {
  int begin, end;    // from the zone's origin on
  int above, equal;  // before `begin`: above the threshold, and equal to it
};

/** Bytes of four words that are at least `least`: byte b of word j is bit 7 - j of byte b. */
struct AtLeast {
  uint32_t add;   // what carries into bit 7 where the lower bits are enough
  uint32_t high;  // all ones: bit 7 of `least` is set, and so must a byte's be

  __device__ __forceinline__ explicit AtLeast(uint32_t least)
      : add((128 - least % 128) * 0x01010101u), high(least >= 128 ? ~0u : 0) {}
  /** The same of one word, in bit 7 of each byte; other bits are anything. */
  __device__ __forceinline__ uint32_t of(uint32_t word) const {
    const uint32_t low = (word & 0x7f7f7f7fu) + add;
    return (word & low) | ((word | low) & ~high);
  }
  __device__ __forceinline__ uint32_t of(const uint4& four) const {
    return (of(four.x) & 0x80808080u) | (of(four.y) >> 1 & 0x40404040u) |
           (of(four.z) >> 2 & 0x20202020u) | (of(four.w) >> 3 & 0x10101010u);
  }
  __device__ __forceinline__ bool any(const uint4& four) const {
    return ((of(four.x) | of(four.y) | of(four.z) | of(four.w)) & 0x80808080u) != 0;
  }
};

constexpr uint32_t kAllBits = 0xf0f0f0f0;

/** The same bits, that of byte b of word j as bit 4 j + b. */
__device__ __forceinline__ uint32_t in_order(uint32_t bits) {
  uint32_t order = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    order |= (bits >> (7 - j) & 0x01010101u) * 0x10204080u >> 28 << 4 * j;
  }
  return order;
}

/** The first `room` of these bits, in their order; `room` becomes what is left of it. */
__device__ __forceinline__ uint32_t first_of(uint32_t bits, int& room) {
  if (room == 0) return 0;
  int count = __popc(bits);
  for (int j = 3; count > room; --j) {
    for (uint32_t of = bits & 0x80808080u >> j; of != 0 && count > room; --count) {
      const uint32_t last = 1u << (31 - __clz(int(of)));
      of ^= last;
      bits ^= last;
    }
  }
  room -= count;
  return bits;
}

/** Of the words of a step, how many a thread looks at at a time. */
constexpr int kWordsAtOnce = 6;

/**
 * Counts of 16 scores from all blocks that score: two of one block for each thread.
 * @param counts  (blocks, ...) of one block sizeof(ScoreCounts) apart
 */
__device__ __forceinline__ int2 load_counts(const int32_t* counts, int blocks) {
  static_assert(kThreads == 8 * kMostScoreBlocks);
  const int block = int(threadIdx.x) / 8, first = 2 * (int(threadIdx.x) % 8);
  if (block >= blocks) return make_int2(0, 0);
  return __ldcg(reinterpret_cast<const int2*>(
      counts + block * int(sizeof(ScoreCounts) / sizeof(int32_t)) + first));
}

/** Stores them, and adds them up in each warp. To be followed by a barrier. */
__device__ __forceinline__ void store_counts(int2 pair, int (*stored)[kFine + 1],
                                             int (*sums)[kFine]) {
  const int block = int(threadIdx.x) / 8, first = 2 * (int(threadIdx.x) % 8);
  stored[block][first] = pair.x;
  stored[block][first + 1] = pair.y;
#pragma unroll
  for (int step = 8; step < 32; step *= 2) {
    pair.x += __shfl_xor_sync(~0u, pair.x, step);
    pair.y += __shfl_xor_sync(~0u, pair.y, step);
  }
  if (lane_id() < 8) {
    sums[warp_id()][first] = pair.x;
    sums[warp_id()][first + 1] = pair.y;
  }
}

/** Their sums over the blocks: in lane b that of score b. */
__device__ __forceinline__ int sum_counts(const int (*sums)[kFine]) {
  int sum = 0;
  if (lane_id() < kFine) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][lane_id()];
  }
  return sum;
}

/**
 * Leaves in the space the highest threshold that `wanted` keys reach, or as many as there are, and
 * how many of a block's keys are above and equal. Score 0 marks unusable keys and never passes.
 * Ties are taken from the lowest index on. All threads; ends with a barrier.
 * @param counts  (blocks) of the blocks that score
 */
__device__ __forceinline__ void find_threshold(const ScoreCounts* counts, int blocks, int wanted,
                                               ThresholdSpace& space) {
  store_counts(load_counts(counts->coarse, blocks), space.counts[0], space.sums[0]);
  __syncthreads();
  // Every warp finds the same.
  int sum = sum_counts(space.sums[0]);
  const int coarse = 31 - __clz(__ballot_sync(~0u, lane_id() < kFine && sum >= wanted) | 1);
  const int next_sum = __shfl_sync(~0u, sum, coarse + 1);
  const int next = coarse + 1 < kFine ? next_sum : 0;  // scores of the next 16 on
  store_counts(load_counts(counts->at_least + kFine * coarse, blocks), space.counts[1],
               space.sums[1]);
  __syncthreads();
  sum = sum_counts(space.sums[1]);
  int fine = 31 - __clz(__ballot_sync(~0u, lane_id() < kFine && sum >= wanted) | 1);
  if (coarse == 0 && fine == 0) fine = 1;
  const int reached = __shfl_sync(~0u, sum, fine), higher = __shfl_sync(~0u, sum, fine + 1);
  const int above = fine + 1 < kFine ? higher : next;
  if (warp_id() == 0) {
    const int block = lane_id();
    const int mine = fine + 1 < kFine     ? space.counts[1][block][fine + 1]
                     : coarse + 1 < kFine ? space.counts[0][block][coarse + 1]
                                          : 0;
    const int equal = space.counts[1][block][fine] - mine;
    space.above[block + 1] = lanes_before(mine) + mine;
    space.equal[block + 1] = lanes_before(equal) + equal;
    if (block == 0) {
      space.above[0] = space.equal[0] = 0;
      space.threshold = kFine * coarse + fine;
      space.ties = min(reached - above, wanted - above);
      space.count = above + space.ties;
    }
  }
  __syncthreads();
}

/**
 * The keys of whole warps of such blocks among which candidates [first, last) lie. Every warp finds
 * the same.
 * @param counts    (blocks) of the blocks that score
 * @param begin_of  begin_of(block): its first unit, of `keys` keys
 */
template <typename BeginOf>
__device__ __forceinline__ ScoreRange narrow(const ScoreCounts* counts, int blocks,
                                             BeginOf begin_of, int keys, int first, int last,
                                             const ThresholdSpace& space) {
  const int lane = lane_id(), threshold = space.threshold, ties = space.ties;
  const auto before = [&](int above, int equal) { return above + min(equal, ties); };
  const uint32_t mine =
      __ballot_sync(~0u, lane < blocks && before(space.above[lane], space.equal[lane]) < last &&
                             before(space.above[lane + 1], space.equal[lane + 1]) > first);
  if (mine == 0) return {0, 0, 0, 0};
  const int first_block = __ffs(mine) - 1, last_block = 31 - __clz(mine);
  const int from = keys * begin_of(first_block), until = keys * begin_of(last_block + 1);
  if (until - from <= 16 * kThreads * kWordsAtOnce) {  // a trip to memory would take longer
    return {from, until, space.above[first_block], space.equal[first_block]};
  }
  // Lanes under 8: the warps of the first of these blocks. Lanes from 8 on: of the last one.
  const bool ending = lane >= kWarps;
  const int block = ending ? last_block : first_block, warp = lane % kWarps;
  const int32_t* of = counts[block].of_warps[warp];
  int above = threshold < 255 ? __ldcg(of + threshold + 1) : 0;
  int equal = __ldcg(of + threshold) - above;
  const int own_above = above, own_equal = equal;
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const int lower_above = __shfl_up_sync(~0u, above, step, kWarps);
    const int lower_equal = __shfl_up_sync(~0u, equal, step, kWarps);
    if (warp >= step) above += lower_above, equal += lower_equal;
  }
  above += space.above[block];
  equal += space.equal[block];
  const int above_before = above - own_above, equal_before = equal - own_equal;
  const int begin =
      31 - __clz(__ballot_sync(~0u, !ending && before(above_before, equal_before) <= first));
  const int end =
      __ffs(__ballot_sync(~0u, ending && lane < 2 * kWarps && before(above, equal) >= last)) - 1;
  const int unit = begin_of(block), count = begin_of(block + 1) - unit;
  const int at = unit + warp_begin(count, warp), next = unit + warp_begin(count, warp + 1);
  return {keys * __shfl_sync(~0u, at, begin), keys * __shfl_sync(~0u, next, end),
          __shfl_sync(~0u, above_before, begin), __shfl_sync(~0u, equal_before, begin)};
}

/**
 * Candidates [first, last) of the head among the scores of a range, by a block: a warp looks at
 * neighbouring ones. All threads.
 * @param scores  from the zone's origin on; the zone begins at `shift`
 * @param take    take(index, offset): candidate `index`, `offset` from the zone's begin
 */
template <typename Take>
__device__ __forceinline__ void compact_scores(const uint8_t* scores, const ScoreRange& range,
                                               int shift, int first, int last,
                                               ThresholdSpace& space, Take take) {
  const uint32_t threshold = uint32_t(space.threshold);
  const AtLeast reaches(threshold), passes(min(threshold + 1, 255u));
  const uint32_t higher_exist = threshold == 255 ? 0 : ~0u;
  const int ties = space.ties, end = range.end, lane = lane_id();
  uint4* found = space.word[warp_id()];
  int32_t* positions = space.position[warp_id()];
  int above = range.above, equal = range.equal;
  constexpr int kOfWord = 16 * kThreads;
  int turn = 0, words = 0;
#pragma unroll 1
  for (int base = range.begin; base < end; base += words * kOfWord, turn ^= 1) {
    words = min((end - base + kOfWord - 1) / kOfWord, kMostWords);
    // Words that reach the threshold are few and anywhere: they are listed, and then each lane has
    // one.
    const int at = base + 16 * (32 * words * warp_id() + lane);
    int listed = 0;
#pragma unroll
    for (int word = 0; word < kMostWords; word += kWordsAtOnce) {
      if (word >= words) break;
      uint4 loaded[kWordsAtOnce];
#pragma unroll
      for (int i = 0; i < kWordsAtOnce; ++i) {
        const int from = at + 16 * 32 * (word + i);
        loaded[i] = word + i < words && from < end
                        ? __ldcg(reinterpret_cast<const uint4*>(scores + from))
                        : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kWordsAtOnce; ++i) {
        if (word + i >= words) break;
        const bool reached = reaches.any(loaded[i]);
        const uint32_t has = __ballot_sync(~0u, reached);
        if (reached) {
          const int place = listed + __popc(has & ((1u << lane) - 1));
          found[place] = loaded[i];
          positions[place] = at + 16 * 32 * (word + i);
        }
        listed += __popc(has);
      }
    }
    __syncwarp();

    // Which bytes are above the threshold, and four bits lower which are equal to it. Both are
    // counted in one number: a step has less than 2^16 keys.
    const auto count_of = [](uint32_t bits) {
      return __popc(bits & kAllBits) + (__popc(bits & ~kAllBits) << 16);
    };
    int counts = 0;
    for (int i = lane; i < listed; i += 32) {
      const uint4 four = found[i];
      const uint32_t higher = passes.of(four) & higher_exist, tied = reaches.of(four) & ~higher;
      const uint32_t bits = higher | tied >> 4;
      found[i].x = bits;
      counts += count_of(bits);
    }
    counts = __reduce_add_sync(~0u, counts);
    if (lane == 0) space.in_warp[turn][warp_id()] = counts;
    __syncthreads();
    const int of_warp = lane < kWarps ? space.in_warp[turn][lane] : 0;
    const auto all = uint32_t(__reduce_add_sync(~0u, of_warp));
    const auto before = uint32_t(__reduce_add_sync(~0u, lane < warp_id() ? of_warp : 0));
    int above_before = above + int(before & 0xffff), equal_before = equal + int(before >> 16);
#pragma unroll 1
    for (int begin = 0; begin < listed; begin += 32) {
      const int i = begin + lane;
      const uint32_t bits = i < listed ? found[i].x : 0;
      const int mine = count_of(bits), lower = lanes_before(mine);
      const int equal_here = equal_before + (lower >> 16);
      int room = max(ties - equal_here, 0);
      int index = above_before + (lower & 0xffff) + min(equal_here, ties);
      const uint32_t passing = (bits & kAllBits) | first_of(bits << 4 & kAllBits, room);
      const int position = i < listed ? positions[i] - shift : 0;
      for (uint32_t left = in_order(passing); left != 0; left &= left - 1) {
        if (index >= first && index < last) take(index, position + __ffs(int(left)) - 1);
        ++index;
      }
      const int sum = __shfl_sync(~0u, lower + mine, 31);
      above_before += sum & 0xffff;
      equal_before += sum >> 16;
    }
    __syncwarp();
    above += int(all & 0xffff);
    equal += int(all >> 16);
    if (above + min(equal, ties) >= last) break;
  }
}

}  // namespace pariskv::cuda::device
