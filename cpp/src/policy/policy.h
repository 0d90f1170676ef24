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
#include "pariskv/stats.h"

namespace pariskv {

/** Positions [begin, end) of one layer of one sequence. */
struct Span {
  SequenceView sequence;
  int64_t begin, end;
};

/** A batch in which every sequence searches its zone. */
struct SelectArgs {
  int64_t batch;
  const SequenceView* sequences;  // (batch)
  const int64_t* rows;            // (batch) the sequence's row of q and of the running softmax
  TensorView q;                   // (rows, query_heads, head_dim)
  Logits logits;
  const float* maximum;     // (rows, query_heads) resident attention so far: its largest
  const float* sum;         // (rows, query_heads) logit, and the sum of exp below it
  int32_t* selected;        // (rows, heads, width) written: positions, best first
  int64_t* selected_count;  // (rows, heads) written
};

/** What a selection came to, for statistics. */
struct SelectCounts {
  int64_t candidates = 0;
  int64_t rows = 0;
};

class Policy {
 public:
  virtual ~Policy() = default;

  /** Bytes of summaries for one segment of all kv heads. */
  virtual int64_t summary_bytes() const = 0;

  /** Bytes of what is kept per layer and sequence besides summaries. */
  virtual int64_t state_bytes() const = 0;

  /** The most rows it selects for one kv head: the width of SelectArgs::selected. */
  virtual int64_t width() const = 0;

  /** Whether a sequence with this many tokens, and this many in the zone, searches at all. */
  virtual bool searches(int64_t total, int64_t zone_tokens) const = 0;

  /** Positions [begin, end) entered the zone; their rows are readable. */
  virtual void on_spill(const Span& span, Stream stream) = 0;

  /** Positions [begin, end) are about to leave the zone. */
  virtual void on_recall(const Span& span, Stream stream) = 0;

  /** Sees that the next `select` of these sequences needs no memory it does not have. */
  virtual void reserve(const SequenceView* sequences, int64_t count, Arena& arena) = 0;

  virtual SelectCounts select(const SelectArgs& args, Stream stream) = 0;

  /** Says what the first sequence of the last `select` went through. */
  virtual void explain(Explanation& explanation) const = 0;

  /** The summaries of a zone, unpacked. */
  virtual Summaries summaries(const SequenceView& sequence) const = 0;

  /** Keys of a zone that can never be selected, over kv heads. */
  virtual int64_t unusable_keys(const SequenceView& sequence) const = 0;

  /** Scratch held between calls, and giving it back. */
  virtual int64_t workspace_bytes() const = 0;
  virtual void release() noexcept = 0;
};

std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend);

}  // namespace pariskv
