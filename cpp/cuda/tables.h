/**
 * What kernels of a step read from device memory instead of from their arguments, so that a
 * captured graph stays valid while sequences grow: the host writes these tables, in stream order,
 * and a launch names only where they are.
 *
 * A sequence is an array of SequenceView, one per layer, whose pointers lead to memory of the
 * device or the host. A slot is one row of a batch: which sequence it decodes, and, by policy, its
 * scratch.
 */
#pragma once

#include <cstdint>

#include "arguments.h"
#include "ops.h"

namespace pariskv::cuda {

/** The slots of every policy begin with this. Members are multiples of 8 bytes, as everything that
 * the host writes word by word. */
struct BatchSlot {
  const SequenceView* layers;  // (layers); null: an idle slot
};

/** A step: one token of each of some sequences. Calls of policies add to it. */
struct StepCall {
  ModelShape shape;
  int64_t batch;
  int64_t layer;
  Rows q;      // (batch, query_heads, key_dim)
  Rows k, v;   // (batch, heads, key_dim or value_dim): the new token, at total - 1; data
               // null: none, all rows are in the store
  Rows out;    // (batch, query_heads, value_dim); data null: not wanted
  float* lse;  // (batch, query_heads) `lse_stride` apart; null: not wanted
  int64_t lse_stride;
  Logits logits;  // sink_bias in device memory
};

}  // namespace pariskv::cuda
