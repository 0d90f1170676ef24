/**
 * A policy on a device: one object that says what it keeps beside K and V, takes keys in and out of
 * a retrieval zone, chooses kept rows, decodes and explains. It never touches K and V, so all of a
 * sequence can always be attended to, and policies can be exchanged.
 *
 * The cache owns the bytes and the walk; a search owns their meaning. `state` is a block of
 * Needs::state_bytes per layer and sequence, zeroed at the start, copied on fork. The part of a
 * policy that every device shares is in policy/<name>/, its work on a device in cpu/<name>/ and
 * cpp/cuda/<name>/. A policy sees no other one; docs/add-a-policy.md lists the steps.
 */
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ops.h"
#include "pariskv/stats.h"
#include "pariskv/stream.h"
#include "query_windows.h"

namespace pariskv {

/** Positions [begin, end) of one layer of one sequence. */
struct Span {
  SequenceView sequence;
  int64_t begin, end;
  int64_t observed = 0;  // queries that were given to `observe`, of those that the search wants
};

/** Queries of positions [begin, end) of one layer of one sequence, all of one window. */
struct QuerySpan {
  SequenceView sequence;
  int64_t begin, end;
  int64_t number;  // of the first one, among all that the search wants
  TensorView q;    // (end - begin, query_heads, key_dim)
};

/** What a search needs of the cache. It never changes in the life of a cache. */
struct Needs {
  int64_t summary_bytes = 0;  // of summaries for one segment of all kv heads
  int64_t state_bytes = 0;    // kept per layer and sequence besides summaries
  int64_t grain = 1;          // a zone ends at a multiple: the size of a page or block of keys
  int64_t opening = 0;        // a zone opens with so many positions at once; 0: with any
  QueryWindows observed;      // of a prompt: queries that are wanted
  int64_t tail_rows = 0;      // rows of a zone that stand for those not selected: see tail.h
  // That they are drawn by; none: each sequence has a secret one of its own.
  std::optional<uint32_t> tail_seed = 0;
  int64_t rows_per_head = 0;     // the most rows that a step selects per kv head; 0: none ever
  bool drops_rows = false;       // rows of a zone are given back once others were chosen to be kept
  bool waits_for_kept = true;    // until rows were chosen, a zone of which some are to be kept is
                                 // attended to in full
  bool estimates_error = false;  // a step can tell DecodeArgs::error
  bool leaves_dense = false;     // a step knows DecodeArgs::paged
  bool fits_a_file = true;  // rows, summaries and the state are all that a sequence goes on with
  StepRules steps;          // when a sequence is searched
};

class Search {
 public:
  Search(const ModelShape& shape, const Needs& needs) : shape_(shape), needs_(needs) {}
  virtual ~Search() = default;

  /** With the slots that the search wants: recent queries, a row cache. */
  const ModelShape& shape() const { return shape_; }
  const Needs& needs() const { return needs_; }

  // Zones.

  /**
   * Sets `plan`, which comes as zeros, for a zone of this size.
   * @return whether a step would leave rows of it out; else a search is of no use
   */
  virtual bool plan(SequenceView& sequence) const = 0;

  /**
   * Queries of a prompt, of positions that are wanted: from the first of Needs::observed on, or
   * from where the last ones ended. The state is there.
   */
  virtual void observe(const std::vector<QuerySpan>& spans, Stream stream);

  /** These positions, each span of another layer or sequence, enter zones; rows are readable. */
  virtual void enter(const std::vector<Span>& spans, Stream stream) = 0;

  /** Positions [begin, end) are about to leave the zone. */
  virtual void leave(const Span& span, Stream stream) = 0;

  /** Copies rows of tails to where they lie side by side. Called where Needs::tail_rows is set. */
  virtual void copy_tail_rows(const TailCopyArgs& args, Stream stream);

  // Kept rows: see kept.h. The defaults are of searches that keep none.

  /** Rows of a zone of this size that are kept per kv head, at most; 0: none are. */
  virtual int64_t kept_rows(int64_t zone_tokens) const;

  /** Bytes that the search adds to a block of so many kept rows. */
  virtual int64_t bytes_beside_kept(int64_t capacity) const;

  /** A block of so many kept rows. */
  int64_t kept_block_bytes(int64_t capacity) const {
    return shape_.kept(capacity).bytes() + bytes_beside_kept(capacity);
  }

  /** Writes queries to where they are remembered. Called where ModelShape::recent is set. */
  virtual void remember(const RememberArgs& args, Stream stream);

  /** Takes the memory that `choose` of these will need. */
  virtual void reserve_choice(const std::vector<KeptChange>& changes);

  /**
   * Zones that changed, each of another layer or sequence: their blocks of kept rows are to be
   * filled. Rows are readable, the queries are there.
   */
  virtual void choose(const std::vector<KeptChange>& changes, Stream stream);

  // Steps.

  /** Sees that the next decode of these sequences needs no memory it does not have. */
  virtual void reserve(const DecodeArgs& args) = 0;

  /**
   * One token of each sequence: attention to resident rows and to the rows that are found for it.
   * Where Capabilities::decode_appends, it also writes the token's own row. A token that is
   * appended has its query remembered, where queries are.
   */
  virtual void decode(const DecodeArgs& args, Stream stream) = 0;

  /** Fills in how rows were found for the first sequence; the sizes and the zone are there. */
  virtual void explain(const DecodeArgs& args, Stream stream, Explanation& explanation) = 0;

  /** Candidates and rows of all decodes so far. */
  virtual DecodeCounts counts() = 0;

  virtual int64_t scratch_bytes() const = 0;
  /** Overwrites the scratch: data of the last steps can no longer be read from it. */
  virtual void clear_scratch(Stream stream) = 0;

  // Looking. The defaults are of searches without summaries.

  /** The summaries of a zone, unpacked. */
  virtual Summaries summaries(const SequenceView& sequence) const;

  /**
   * Zeroes what a segment's summaries hold of other slots than [begin, end): of keys that have left
   * the zone. For a file; `segment` is a copy in the host's memory.
   */
  virtual void clear_outside(uint8_t* segment, int64_t begin, int64_t end) const;

  /** Keys of a zone that can never be selected, over kv heads; 0 where nothing counts them. */
  virtual int64_t unusable_keys(const SequenceView& sequence) const;

 protected:
  const ModelShape shape_;
  const Needs needs_;
};

}  // namespace pariskv
