/**
 * How rows are chosen. A policy says what is kept beside K and V, hears of every token that
 * enters or leaves a retrieval zone, and says how a zone is searched. It never touches K and V,
 * so all of a sequence can always be attended to, and policies can be exchanged.
 *
 * The cache owns the bytes and the walk; a policy owns the meaning. `state` is a block of
 * state_bytes() per layer and sequence, zeroed at the start, copied on fork.
 */
#pragma once

#include <memory>
#include <vector>

#include "backend.h"
#include "ops.h"
#include "pariskv/stats.h"

namespace pariskv {

/** Positions [begin, end) of one layer of one sequence. */
struct Span {
  SequenceView sequence;
  int64_t begin, end;
};

class Policy {
 public:
  virtual ~Policy() = default;

  /** Bytes of summaries for one segment of all kv heads. */
  virtual int64_t summary_bytes() const = 0;

  /** Bytes of what is kept per layer and sequence besides summaries. */
  virtual int64_t state_bytes() const = 0;

  /** Sets how a sequence of this size is searched, or that it is attended to in full. */
  virtual void plan(SequenceView& sequence) const = 0;

  /** These positions, each span of another layer or sequence, entered zones; rows are readable. */
  virtual void on_spill(const std::vector<Span>& spans, Stream stream) = 0;

  /** Positions [begin, end) are about to leave the zone. */
  virtual void on_recall(const Span& span, Stream stream) = 0;

  /** The rules that a decode goes by. */
  virtual SearchRules rules() const = 0;

  /** Says what a search went through. */
  virtual void explain(const SearchTrace& trace, Explanation& explanation) const = 0;

  /** The summaries of a zone, unpacked. */
  virtual Summaries summaries(const SequenceView& sequence) const = 0;

  /** Keys of a zone that can never be selected, over kv heads. */
  virtual int64_t unusable_keys(const SequenceView& sequence) const = 0;
};

std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend);

}  // namespace pariskv
