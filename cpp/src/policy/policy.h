/**
 * How rows are chosen. A policy says which bytes are kept beside K and V, is called for every token
 * that enters or leaves a retrieval zone, and gives the rules by which a zone is searched. It never
 * touches K and V, so all of a sequence can always be attended to, and policies can be exchanged.
 *
 * The cache owns the bytes and the walk; a policy owns their meaning. `state` is a block of
 * state_bytes() per layer and sequence, zeroed at the start, copied on fork. A policy lives in a
 * folder of its own, policy/<name>/, and sees no other; docs/add-a-policy.md lists the steps.
 */
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "ops.h"
#include "pariskv/stats.h"

namespace pariskv {

/** Positions [begin, end) of one layer of one sequence. */
struct Span {
  SequenceView sequence;
  int64_t begin, end;
  bool observed = false;  // all queries that the policy wants were given to on_queries
};

/** Queries of positions [begin, end) of one layer of one sequence. */
struct QuerySpan {
  SequenceView sequence;
  int64_t begin, end;
  TensorView q;  // (end - begin, query_heads, key_dim)
};

class Policy {
 public:
  virtual ~Policy() = default;

  /** Bytes of summaries for one segment of all kv heads. */
  virtual int64_t summary_bytes() const = 0;

  /** Bytes of the state that is kept per layer and sequence besides summaries. */
  virtual int64_t state_bytes() const = 0;

  /** A zone ends at a multiple of this many positions: the size of a page or block of keys. */
  virtual int64_t grain() const { return 1; }

  /** A zone opens with this many positions at once, a multiple of the grain; 0: with any. */
  virtual int64_t opening() const { return 0; }

  /** Queries of these positions of a prompt are wanted, where a prefill brings them. */
  virtual Positions observed() const { return {0, 0}; }

  /**
   * Queries of a prompt, of positions that are wanted: from observed().begin on, or from where the
   * last ones ended. The state is there.
   */
  virtual void on_queries(const std::vector<QuerySpan>& spans, Stream stream) {
    (void)spans, (void)stream;
  }

  /** Rows of a zone that stand for what is not selected: see tail.h. 0: none do. */
  virtual int64_t tail_rows() const { return 0; }

  /**
   * Rows of a zone of this size that are kept per kv head, at most; see kept.h. 0: the policy keeps
   * none.
   */
  virtual int64_t kept_rows(int64_t zone_tokens) const {
    (void)zone_tokens;
    return 0;
  }

  /** Rows of a zone are given back once others were chosen to be kept. */
  virtual bool drops_rows() const { return false; }

  /** Bytes that the policy adds to a block of so many kept rows. */
  virtual int64_t bytes_beside_kept(int64_t capacity) const {
    (void)capacity;
    return 0;
  }

  /** A zone of which rows are to be kept is attended to in full until they were chosen. */
  virtual bool waits_for_kept() const { return true; }

  /** Takes the memory that on_keep of these will need. */
  virtual void reserve_keep(const std::vector<KeptChange>& changes) { (void)changes; }

  /**
   * Zones that changed, each of another layer or sequence: their blocks of kept rows are to be
   * filled. Rows are readable, the queries are there.
   */
  virtual void on_keep(const std::vector<KeptChange>& changes, Stream stream) {
    (void)changes, (void)stream;
  }

  /** Sets `sparse` and `plan` for a sequence of this size; both come as zeros: attend in full. */
  virtual void plan(SequenceView& sequence) const = 0;

  /** These positions, each span of another layer or sequence, entered zones; rows are readable. */
  virtual void on_spill(const std::vector<Span>& spans, Stream stream) = 0;

  /** Positions [begin, end) are about to leave the zone. */
  virtual void on_recall(const Span& span, Stream stream) = 0;

  /** The rules that a decode goes by. */
  virtual Rules rules() const = 0;

  /** Fills in how rows were selected; the sizes and the zone are there already. */
  virtual void explain(const Trace& trace, Explanation& explanation) const = 0;

  /** The summaries of a zone, unpacked. */
  virtual Summaries summaries(const SequenceView& sequence) const = 0;

  /**
   * Zeroes what a segment's summaries hold of other slots than [begin, end): of keys that have left
   * the zone. For a file; `segment` is a copy in the host's memory.
   */
  virtual void clear_outside(uint8_t* segment, int64_t begin, int64_t end) const = 0;

  /** Rows, summaries and the state are all that a sequence needs to go on: what a file holds. */
  virtual bool fits_a_file() const { return true; }

  /** Keys of a zone that can never be selected, over kv heads; 0 where nothing counts them. */
  virtual int64_t unusable_keys(const SequenceView& sequence) const = 0;
};

/** @param config resolved; it outlives the policy */
std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend);

}  // namespace pariskv
