/** How ParisKV searches a zone of some size: what it keeps in SequenceView::plan. */
#pragma once

#include "ops.h"

namespace pariskv {

struct ParisKVPlan {
  int64_t
      candidates;  // reranked per kv head, C of the paper; 0: of a zone with nothing to leave out
  double vote_ratio;  // share of the keys that get a vote in a subspace

  static constexpr ParisKVPlan of(const SequenceView& sequence) {
    return {sequence.plan.words[0], __builtin_bit_cast(double, sequence.plan.words[1])};
  }
  /** Of a step in the sequence's mode. */
  static constexpr int64_t candidates_of(const SequenceView& sequence) {
    return sequence.dense() ? 0 : of(sequence).candidates;
  }
  constexpr void store(SequenceView& sequence) const {
    sequence.plan.words[0] = candidates;
    sequence.plan.words[1] = __builtin_bit_cast(int64_t, vote_ratio);
  }
};

}  // namespace pariskv
