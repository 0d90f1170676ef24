/** How ParisKV searches a zone of some size: what it keeps in SequenceView::plan. */
#pragma once

#include "ops.h"

namespace pariskv {

struct ParisKVPlan {
  int64_t candidates;  // reranked per kv head, C of the paper; 0: attended to in full
  double vote_ratio;   // share of the keys that get a vote in a subspace

  static constexpr ParisKVPlan of(const SequenceView& sequence) {
    return {sequence.plan.words[0], __builtin_bit_cast(double, sequence.plan.words[1])};
  }
  /**
   * Candidates of a step in which sequences of fewer tokens than `in_full_below` are attended to in
   * full if all of their rows are near.
   */
  static constexpr int64_t candidates_of(const SequenceView& sequence, int64_t in_full_below) {
    return sequence.in_full(in_full_below) ? 0 : of(sequence).candidates;
  }
  constexpr void store(SequenceView& sequence) const {
    sequence.plan.words[0] = candidates;
    sequence.plan.words[1] = __builtin_bit_cast(int64_t, vote_ratio);
    sequence.sparse = candidates > 0;
  }
};

}  // namespace pariskv
