/** PRKV's work on zones that change. */
#pragma once

#include "ops.h"
#include "policy/prkv/rules.h"

namespace pariskv {

/** Positions [begin, end) of one sequence, whole pages but for the sink's part of the first. */
struct DigestJob {
  SequenceView sequence;
  int64_t begin, end;
};

/** Pages that enter zones: rows to digests. */
struct DigestArgs {
  ModelShape shape;
  PRKVRules rules;
  int64_t batch;
  const DigestJob* jobs;  // (batch)
};

}  // namespace pariskv
