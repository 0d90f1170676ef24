/**
 * How a step attends to a sequence. It is decided here and nowhere else: the host writes the mode
 * into SequenceView, and kernels, counts and explanations read it.
 *
 * A mode follows from the sequence alone, so that a result does not depend on the batch around it.
 * Config::dense_below = kDenseByBatch asks for the exception.
 */
#pragma once

#include <algorithm>
#include <cstdint>

#include "pariskv/sizes.h"

namespace pariskv {

enum class StepMode : int64_t {
  kDense,     // to all rows
  kSearched,  // to resident rows, and to rows of the zone that the step selects
  kKept,      // to resident rows, and to rows of the zone that were chosen before
};

/**
 * Where a step of a GPU takes as long with a search as without. A search costs about the same at
 * any length, and attention in full costs its tokens. A chain of kernels has waits beside that,
 * which one sequence pays alone and many share: together they have to be worth these.
 */
struct Crossing {
  int64_t tokens;  // of a sequence that costs the same either way, waits aside
  int64_t worth;   // what a step has to have beyond, times kv heads, of all its sequences
};

struct Crossings {
  Crossing own{};    // of the engine's attention in full
  Crossing paged{};  // of a host's (docs/pages.md)

  /**
   * Of heads of another kind than the measured ones, four query heads of 128 dimensions for a kv
   * head. A search takes its time for query heads, attention in full for a row's bytes, so with
   * more query heads a search begins later; its waits are worth more rows of few bytes. Where the
   * host is quick with many query heads, waits weigh more as well.
   */
  constexpr Crossings of_heads(int64_t group, int64_t dim) const {
    group = std::max<int64_t>(group, 4);
    const auto scaled = [&](const Crossing& at, int64_t waits) {
      return Crossing{at.tokens * (3 * group - 4) / 8, at.worth * 128 / dim * waits / 8};
    };
    return {scaled(own, 8), scaled(paged, 4 + group)};
  }
};

/** What the settings of a cache say about modes. */
struct StepRules {
  int64_t dense_below = 0;  // tokens from which a sequence may be searched
  bool selects = false;     // steps select rows; else they have kept ones
  Crossings crossings{};    // of no tokens: lengths alone decide

  constexpr bool look_at_batch() const { return crossings.own.tokens > 0; }
};

/** What the sequences of a step decide together. */
struct StepBatch {
  int64_t near_from = 0;        // tokens from which those are searched whose rows are all near
  int64_t holds = kMostTokens;  // further steps of these sequences for which that stays so
};

/** Adds up the sequences of a step for its StepBatch. */
class StepSum {
 public:
  constexpr StepSum(const StepRules& rules, bool paged, int64_t kv_heads)
      : at_(paged ? rules.crossings.paged : rules.crossings.own),
        dense_below_(rules.dense_below),
        heads_(kv_heads) {}

  /** @param near  see StepFacts */
  constexpr void add(int64_t total, bool near) {
    if (near) {
      beyond_ += std::max<int64_t>(total - at_.tokens, 0);
      growing_ += total + kAhead > at_.tokens;
    } else {
      searches_ = searches_ || total >= dense_below_;
    }
  }

  constexpr StepBatch decided() const {
    if (at_.tokens == 0) return {};
    const int64_t lacks = at_.worth - beyond_ * heads_;
    // The waits are paid anyway where rows are far.
    if (searches_ || lacks <= 0) return {at_.tokens, kMostTokens};
    const int64_t each_step = growing_ * heads_;
    return {kMostTokens, each_step > 0 ? std::min((lacks - 1) / each_step, kAhead) : kAhead};
  }

 private:
  static constexpr int64_t kAhead = 256;  // steps that are looked ahead

  const Crossing at_;
  const int64_t dense_below_, heads_;
  int64_t beyond_ = 0, growing_ = 0;
  bool searches_ = false;
};

/** What is known of a sequence when its mode is decided. */
struct StepFacts {
  int64_t total = 0;
  bool leaves_out = false;     // the policy would leave rows out of such a zone
  bool lacks_rows = false;     // some were given back: the zone can never be attended to in full
  bool awaits_choice = false;  // of rows to keep: until then the zone is attended to in full
  bool near = false;           // all rows are plain, and none is in host memory beside a GPU
  int64_t near_from = 0;       // of the step's batch; 0: of no step
};

/** Tokens from which such a sequence is searched. */
constexpr int64_t searched_from(const StepRules& rules, const StepFacts& facts) {
  return facts.near ? std::max(rules.dense_below, facts.near_from) : rules.dense_below;
}

constexpr StepMode mode_of(const StepRules& rules, const StepFacts& facts) {
  const bool searched = facts.leaves_out && facts.total >= searched_from(rules, facts);
  if (facts.awaits_choice || (!searched && !facts.lacks_rows)) return StepMode::kDense;
  return rules.selects ? StepMode::kSearched : StepMode::kKept;
}

}  // namespace pariskv
