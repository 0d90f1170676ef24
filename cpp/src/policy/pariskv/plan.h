/** How ParisKV searches a zone of some size: its two words of SequenceView::plan. */
#pragma once

#include <cstring>

#include "ops.h"

namespace pariskv {

struct ParisKVPlan {
  int64_t candidates;  // reranked per kv head, C of the paper; 0: attended to in full
  double vote_ratio;   // share of the keys that get a vote in a subspace

  static ParisKVPlan of(const SequenceView& sequence) {
    ParisKVPlan plan;
    static_assert(sizeof plan == sizeof sequence.plan);
    std::memcpy(&plan, sequence.plan, sizeof plan);
    return plan;
  }
  void store(SequenceView& sequence) const {
    std::memcpy(sequence.plan, this, sizeof sequence.plan);
    sequence.sparse = candidates > 0;
  }
};

}  // namespace pariskv
