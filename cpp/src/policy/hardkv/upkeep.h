/** HARD-KV's work on zones that change. */
#pragma once

#include "ops.h"

namespace pariskv {

/** Fills blocks of kept rows: with the rows that a cut leaves, or with rows that are chosen. */
struct HardKVKeep {
  ModelShape shape;
  HardKVRules rules;
  int64_t batch;
  const KeptChange* changes;  // (batch)
};

}  // namespace pariskv
