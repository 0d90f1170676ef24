/**
 * How rows are chosen. A policy says what is kept beside K and V, hears of every token that
 * enters or leaves a retrieval zone, and picks rows for a query. It never touches K and V,
 * so all of a sequence can always be attended to, and policies can be exchanged.
 *
 * The cache owns the bytes and the walk; a policy owns the meaning. `state` is a block of
 * state_bytes() per layer and sequence, zeroed at the start, copied on fork.
 */
#pragma once

#include <memory>

#include "backend.h"
#include "memory/arena.h"
#include "ops.h"

namespace pariskv {

/** A batch in which every sequence searches its zone. */
struct SelectArgs {
  int64_t batch;
  const SequenceView* sequences;  // (batch)
  const int64_t* rows;            // (batch) the sequence's row of q and of the running softmax
  TensorView q;                   // (rows, query_heads, head_dim)
  Logits logits;
  const float* maximum;     // (rows, query_heads) resident attention so far: its largest
  const float* sum;         // (rows, query_heads) logit, and the sum of exp below it
  int32_t* selected;        // (rows, heads, top_k) written: positions, best first
  int64_t* selected_count;  // (rows, heads) written
};

/** What a selection went through, for statistics and explanations. */
struct SelectTrace {
  std::vector<SearchItem> items;  // (batch) valid until the next selection
  int64_t searchers = 0;
};

class Policy {
 public:
  virtual ~Policy() = default;

  /** Bytes of what is kept per layer and sequence besides summaries. */
  virtual int64_t state_bytes() const = 0;

  /** Whether a sequence with this many tokens, and this many in the zone, searches at all. */
  virtual bool searches(int64_t total, int64_t zone_tokens) const = 0;

  /** Positions [begin, end) entered the zone; their rows are readable. */
  virtual void on_spill(const EncodeJob* jobs, int64_t count, Stream stream) = 0;

  /** Positions [begin, end) are about to leave the zone. */
  virtual void on_recall(const EncodeJob* jobs, int64_t count, Stream stream) = 0;

  /** Sees that the next `select` of these sequences needs no memory it does not have. */
  virtual void reserve(const SequenceView* sequences, int64_t count, Arena& arena) = 0;

  virtual const SelectTrace& select(const SelectArgs& args, Stream stream) = 0;

  /** Splits a state block; which part of it counts unusable keys is the policy's business. */
  virtual KeyStatistics statistics(void* state) const = 0;

  /** Scratch held between calls. */
  virtual int64_t workspace_bytes() const = 0;
};

}  // namespace pariskv
