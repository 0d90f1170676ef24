/** PRKV's work on zones that change. */
#pragma once

#include "ops.h"

namespace pariskv {

/** Positions [begin, end) of one sequence, whole pages but for the sink's part of the first. */
struct DigestJob {
  SequenceView sequence;
  int64_t begin, end;
};

/** Pages that enter zones: rows to digests. */
struct PRKVDigest {
  ModelShape shape;
  PRKVRules rules;
  int64_t batch;
  const DigestJob* jobs;  // (batch)
};

/** Fills blocks of kept rows: with the rows that a cut leaves, or with rows that are chosen. */
struct PRKVKeep {
  ModelShape shape;
  PRKVRules rules;
  int64_t batch;
  const KeptChange* changes;  // (batch)
};

}  // namespace pariskv
