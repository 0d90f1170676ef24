/**
 * How a step attends to a sequence. It is decided here and nowhere else: the host writes the mode
 * into SequenceView, and kernels, counts and explanations read it.
 *
 * A mode follows from the sequence alone, so that a result does not depend on the batch around it.
 * Config::dense_below = kDenseByBatch asks for the exception.
 */
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace pariskv {

enum class StepMode : int64_t {
  kDense,     // to all rows
  kSearched,  // to resident rows, and to rows of the zone that the step selects
  kKept,      // to resident rows, and to rows of the zone that were chosen before
};

/**
 * Where a step of a GPU takes as long with a search as without, by the heads of its batch. A chain
 * of kernels has waits that one sequence pays alone and many share.
 */
struct Crossing {
  int64_t heads;   // at most
  int64_t tokens;  // fewer are attended to in full
};

/** What the settings of a cache say about modes. */
struct StepRules {
  int64_t dense_below = 0;                 // tokens from which a sequence may be searched
  bool selects = false;                    // steps select rows; else they have kept ones
  std::array<Crossing, 3> crossings = {};  // ascending; of no heads: lengths alone decide

  constexpr bool look_at_batch() const { return crossings[0].heads > 0; }

  /** Tokens below which a step of so many heads attends in full where all rows are near. */
  constexpr int64_t crossing(int64_t heads) const {
    for (const Crossing& each : crossings) {
      if (heads > 0 && heads <= each.heads) return each.tokens;
    }
    return 0;
  }
};

/** What is known of a sequence when its mode is decided. */
struct StepFacts {
  int64_t total = 0;
  bool leaves_out = false;     // the policy would leave rows out of such a zone
  bool lacks_rows = false;     // some were given back: the zone can never be attended to in full
  bool awaits_choice = false;  // of rows to keep: until then the zone is attended to in full
  bool near = false;           // all rows are plain, and none is in host memory beside a GPU
  int64_t heads = 0;           // kv heads of the step's batch; 0: of no step
};

/** Tokens from which such a sequence is searched. */
constexpr int64_t searched_from(const StepRules& rules, const StepFacts& facts) {
  return facts.near ? std::max(rules.dense_below, rules.crossing(facts.heads)) : rules.dense_below;
}

constexpr StepMode mode_of(const StepRules& rules, const StepFacts& facts) {
  const bool searched = facts.leaves_out && facts.total >= searched_from(rules, facts);
  if (facts.awaits_choice || (!searched && !facts.lacks_rows)) return StepMode::kDense;
  return rules.selects ? StepMode::kSearched : StepMode::kKept;
}

}  // namespace pariskv
