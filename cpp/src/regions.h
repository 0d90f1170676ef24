/**
 * Which token is where. Pure integers; the only place that knows the rules.
 *
 * Positions run [0, total). A sequence is, in order,
 *
 *   [ sink | retrieval | window = local, then update buffer ]
 *   0      sink_end    retrieval_end                        total
 *
 * Tokens enter at the right and move left: into the retrieval zone when a flush is
 * due (the buffer holds `update` tokens) or asked for. Flushing keeps the most recent
 * `local` tokens in the window and moves the rest. A zone grows and shrinks by whole grains of
 * positions, counted from 0: up to grain - 1 tokens more stay in the window. A policy that learns
 * from the first keys of a zone has it open with that many at once.
 */
#pragma once

#include <cstdint>

#include "pariskv/stats.h"

namespace pariskv {

struct RegionSizes {
  int64_t sink;
  int64_t local;
  int64_t update;
  int64_t grain = 1;    // the zone ends at a multiple of it
  int64_t opening = 0;  // and not before this position: until then there is none
};

class Regions {
 public:
  /** The three numbers that a sequence's regions follow from. */
  struct Marks {
    int64_t total;
    int64_t retrieval_end;
    int64_t buffer_begin;
  };

  Regions() = default;
  explicit Regions(const Marks& marks)
      : total_(marks.total),
        retrieval_end_(marks.retrieval_end),
        buffer_begin_(marks.buffer_begin) {}
  Marks marks() const { return {total_, retrieval_end_, buffer_begin_}; }

  /** Whether calls can lead to these marks, for some local window and update buffer. */
  static bool reachable(const Marks& marks, const RegionSizes& sizes);

  int64_t total() const { return total_; }
  int64_t sink_end(const RegionSizes& sizes) const {
    return total_ < sizes.sink ? total_ : sizes.sink;
  }
  /** One past the last retrieval token; never before the sink's end. */
  int64_t retrieval_end(const RegionSizes& sizes) const {
    const int64_t sink = sink_end(sizes);
    return retrieval_end_ < sink ? sink : retrieval_end_;
  }
  int64_t zone_tokens(const RegionSizes& sizes) const {
    return retrieval_end(sizes) - sink_end(sizes);
  }
  bool flush_due(const RegionSizes& sizes) const { return counts(sizes).buffer >= sizes.update; }
  RegionCounts counts(const RegionSizes& sizes) const;

  /** One token more, or several, in the buffer. */
  Regions appended(int64_t tokens = 1) const;

  /** `tokens` more, one by one, flushed whenever that is due: as decode steps do. */
  Regions grown(int64_t tokens, const RegionSizes& sizes) const;

  /** Everything but the most recent `local` tokens, by whole grains, in the zone; buffer empty. */
  Regions flushed(const RegionSizes& sizes) const;

  /** `tokens` more, then flushed, as a prefill does. */
  Regions prefilled(int64_t tokens, const RegionSizes& sizes) const;

  /**
   * The last `tokens` gone. Where that cuts the local window short, tokens come back from
   * the zone, by whole grains, so that a shortened sequence still sees its recent past in full.
   */
  Regions truncated(int64_t tokens, const RegionSizes& sizes) const;

 private:
  int64_t total_ = 0;
  int64_t retrieval_end_ = 0;
  int64_t buffer_begin_ = 0;  // tokens from here on came after the last flush
};

}  // namespace pariskv
