/**
 * Exact selection of candidates on small integers: what the blocks that score have counted gives a
 * threshold, and a block compacts the scores among which its slice of the candidates lies, in index
 * order. Ties go to the lower index. Definitions are in select_impl.cuh.
 */
#pragma once

#include "pariskv/decode/score/counts.cuh"

namespace pariskv::cuda::device {

/** Words of 16 scores that a thread looks at in one step, at most. */
constexpr int kMostWords = 11;

/** What the blocks that score a head leave of its counts. */
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

/**
 * Leaves in the space the highest threshold that `wanted` keys reach, or as many as there are, and
 * how many of a block's keys are above and equal. Score 0 marks unusable keys and never passes.
 * Ties are taken from the lowest index on. All threads; ends with a barrier.
 * @param counts  (blocks) what they have counted
 */
__device__ __forceinline__ void find_threshold(const ScoreCounts* counts, int blocks, int wanted,
                                               ThresholdSpace& space);

/** Some scores of a head among which candidates lie, and how many lie before them. */
struct ScoreRange {
  int begin, end;    // from the zone's origin on
  int above, equal;  // before `begin`: above the threshold, and equal to it
};

/**
 * The keys of whole warps of such blocks among which candidates [first, last) lie. Every warp finds
 * the same.
 * @param counts    (blocks) what they have counted
 * @param begin_of  begin_of(block): its first unit, of `keys` keys
 */
template <typename BeginOf>
__device__ __forceinline__ ScoreRange narrow(const ScoreCounts* counts, int blocks,
                                             BeginOf begin_of, int keys, int first, int last,
                                             const ThresholdSpace& space);

/**
 * Candidates [first, last) of the head among the scores of a range, by a block: a warp looks at
 * neighbouring ones. All threads.
 * @param scores  from the zone's origin on; the zone begins at `shift`
 * @param take    take(index, offset): candidate `index`, `offset` from the zone's begin
 */
template <typename Take>
__device__ __forceinline__ void compact_scores(const uint8_t* scores, const ScoreRange& range,
                                               int shift, int first, int last,
                                               ThresholdSpace& space, Take take);

}  // namespace pariskv::cuda::device
