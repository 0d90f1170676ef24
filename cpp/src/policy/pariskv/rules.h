/** The constants of a decode by ParisKV: they never change in the life of a cache. */
#pragma once

#include <cstdint>
#include <vector>

#include "pariskv/policies.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv {

/** The constants of the codec, equal on every backend. */
struct Codec {
  SummaryLayout layout;               // of a segment's summaries
  std::vector<float> rotation_signs;  // (rotated_dim) +1 or -1
  std::vector<float> thresholds;      // (7)
  std::vector<float> centres;         // (8)
  std::vector<float> signed_centres;  // (16) level + 8 * sign bit
};

struct ParisKVRules {
  const Codec* codec;
  Scorer scorer;
  GroupRule group_rule;
  int64_t top_k;
  int64_t searchers;     // queries that search for a kv head: its group, or one mean query
  int64_t tail_rows;     // see tail.h; 0: what is not selected is left out
  double error;          // that a step may leave to its sample, see budget.h; 0: there is no budget
  bool estimates_error;  // a step can tell it
};

/** Largest quantised query element: a nibble of 4 such sums fits a byte, in every SIMD set. */
constexpr int32_t kQueryLevels = 15;

/** Keys of a zone, evenly spread, that stand for all that are no candidates. */
constexpr int64_t kSampledKeys = 128;

/** Rows that are worth less are ordered by their logits: an exponential is nothing by then. */
constexpr float kLeastWorth = 0x1p-100f;

/** Coarse scores per spread of logits, and spreads from 0 to the mean; see
 * policy/pariskv/codec/head_scale.h. */
constexpr double kScoreSteps = 16;
constexpr double kScoreShift = 4;

}  // namespace pariskv
