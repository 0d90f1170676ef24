/** ParisKV's work on keys that enter or leave a zone. */
#pragma once

#include "ops.h"

namespace pariskv {

/** Statistics of a zone's keys, kept as they come and go. Whole numbers: order cannot matter. */
struct KeyStatistics {
  int64_t* usable;        // (heads) keys that can be selected
  int64_t* square_units;  // (heads) sum of norm^2, in units of kNormUnit^2
  int64_t* sums;          // (heads, rotated_dim) sum of norm * sign, in units of kNormUnit
  int32_t* counts;        // (heads, subspaces, 256) keys per centroid; null: not kept
};

/** Positions [begin, end) of one sequence. */
struct EncodeJob {
  SequenceView sequence;
  KeyStatistics statistics;
  int64_t begin, end;
};

struct EncodeArgs {
  ModelShape shape;
  const Codec* codec;
  int64_t batch;
  const EncodeJob* jobs;  // (batch)
};

/** Keys that enter zones: rows to summaries, and their statistics added. */
struct ParisKvEncode : EncodeArgs {};

/** Keys that leave zones: their statistics taken off again. */
struct ParisKvForget : EncodeArgs {};

}  // namespace pariskv
