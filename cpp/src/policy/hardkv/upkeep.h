/** HARD-KV's work on zones that change. */
#pragma once

#include "ops.h"

namespace pariskv {

/** Fills blocks of kept rows. A zone that was cut keeps what is left; else rows are chosen. */
struct HardKvKeep {
  ModelShape shape;
  HardKvRules rules;
  int64_t batch;
  const KeptChange* changes;  // (batch)
};

}  // namespace pariskv
