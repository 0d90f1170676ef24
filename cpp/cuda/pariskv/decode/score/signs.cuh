/**
 * The coarse score by signs: one byte per key of the zone, from its sign bits and its norm, with a
 * histogram. Equal to cpu/plain/score.cpp bit for bit. Definitions are in signs_impl.cuh.
 */
#pragma once

#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/score/prepare_query.cuh"
#include "pariskv/decode/score/ring.cuh"

namespace pariskv::cuda::device {

/**
 * Scores units [first, end) of this warp against the quantised queries of `quads` quads: of each
 * key, its scores joined. All lanes of a warp; warps do not wait for one another.
 * @param queries  after `settle`
 * @param blocks   logits of means, from the first of these queries on
 */
template <int kWords, bool kBlocks>
__device__ __forceinline__ void score_signs(Ring<kWords>& ring, const Zone& zone, int first,
                                            int end, const Queries<kWords>& queries, int quads,
                                            const BlockSteps& blocks, const ScoreOutput& out);

}  // namespace pariskv::cuda::device
