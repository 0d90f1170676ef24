/**
 * A choice of kept rows on its way through the CPU's verbs: arrays that are cut from scratch, the
 * attention that the last queries pay to rows, the best rows, and the block that they fill.
 */
#pragma once

#include <algorithm>

#include "cpu/rows.h"
#include "cpu/running.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "ops.h"

namespace pariskv::cpu {

constexpr uint8_t kNewcomer = 255;  // the age of a row that was not kept before
constexpr uint8_t kChosen = 2;      // of Choice::usable
constexpr int32_t kStored = -1;     // of Choice::sources: the row is in the store

/** Rows of the best pages alone are looked at, by their digests. */
struct PageFilter {
  int64_t page;    // rows
  int64_t wanted;  // pages; 0: all rows are looked at
  int64_t latest;  // rows that are looked at besides, as are those that were kept before
};

/** How a policy looks at its last queries. */
struct ObserveRules {
  bool whole;      // rows are chosen from all of a zone, whatever is kept of it
  bool each_head;  // every query head is an asker; else a group's largest logits are one
  int64_t pool;    // neighbours: their largest logit ranks a row; 1: its own does
  int64_t top;     // first and last askers of a head are compared by their best so many; 0: no
  PageFilter filter;

  bool fresh(const KeptChange& change) const { return whole || change.fresh(); }
};

/** The arrays of a choice, cut from scratch. Askers and logits are one head's. */
struct Choice {
  static constexpr int64_t kAskersAtOnce = 32;  // have their logits there at a time

  int64_t width;          // rows per head, at most
  int16_t* numbers;       // (queries, key_dim) of the heads of queries that have a say
  RecentScale* scales;    // (queries)
  int32_t* offsets;       // (queries) logits of the reference, in steps
  int64_t* owner;         // (queries) number of the asker that each is of, ascending
  int64_t* first_query;   // (askers + 1) of each
  int64_t* asked;         // (askers) the position that each asks at
  int64_t* first_asker;   // (group + 1) of each query head; set where each is an asker
  int32_t* logits;        // (kAskersAtOnce, width) in steps; then weights
  uint64_t* reciprocals;  // (kAskersAtOnce, 2) of the weights' sum, and of the pooled ones'
  int32_t* positions;     // (heads, width) of the rows, ascending
  int32_t* sources;       // (heads, width) their numbers in the block before; kStored: they are new
  uint8_t* ages;          // (heads, width) of rows that were kept, see kept.h; kNewcomer
  uint8_t* usable;        // (heads, width) 1: the key is finite, also without the reference;
                          // kChosen: it is among the best
  uint64_t* shares;       // (heads, width) of the attention, summed over askers
  uint64_t* ranks;        // (heads, width) the metric, the same way; 0 without a say
  int64_t* counts;        // (heads) rows
  uint8_t* has_queries;   // (heads) some query had a say
  int64_t* compared;      // (heads) query heads with first and last askers compared,
  int64_t* agreed;        // (heads) and rows that are among the best of both, summed over these

  static Choice cut(const ModelShape& shape, const ObserveRules& rules, int64_t width,
                    Cutter& cutter) {
    const int64_t heads = shape.kv_heads, queries = shape.recent * shape.group;
    const int64_t askers = rules.each_head ? queries : shape.recent;
    Choice out{};
    out.width = width;
    out.numbers = cutter.take<int16_t>(queries * shape.rows.key_dim);
    out.scales = cutter.take<RecentScale>(queries);
    out.offsets = cutter.take<int32_t>(queries);
    out.owner = cutter.take<int64_t>(queries);
    out.first_query = cutter.take<int64_t>(askers + 1);
    out.asked = cutter.take<int64_t>(askers);
    out.first_asker = cutter.take<int64_t>(shape.group + 1);
    out.logits = cutter.take<int32_t>(kAskersAtOnce * width);
    out.reciprocals = cutter.take<uint64_t>(kAskersAtOnce * 2);
    out.positions = cutter.take<int32_t>(heads * width);
    out.sources = cutter.take<int32_t>(heads * width);
    out.ages = cutter.take<uint8_t>(heads * width);
    out.usable = cutter.take<uint8_t>(heads * width);
    out.shares = cutter.take<uint64_t>(heads * width);
    out.ranks = cutter.take<uint64_t>(heads * width);
    out.counts = cutter.take<int64_t>(heads);
    out.has_queries = cutter.take<uint8_t>(heads);
    out.compared = cutter.take<int64_t>(heads);
    out.agreed = cutter.take<int64_t>(heads);
    return out;
  }
};

/** Rows that a change is chosen from, at most, per kv head. */
int64_t most_rows(const ObserveRules& rules, const KeptChange& change);

/** Of the scratch, that the choices of these changes need. */
int64_t choice_bytes(const ModelShape& shape, const ObserveRules& rules, const KeptChange* changes,
                     int64_t batch);

/** Row number j to choose from: where it was kept, for the store may have it no more. */
inline RowPlace row_to_choose(const ModelShape& shape, const KeptChange& change,
                              const Choice& choice, int64_t head, int64_t j) {
  const int64_t at = head * choice.width + j;
  const int32_t source = choice.sources[at];
  if (source == kStored) return plain_row_at(shape, change.after, head, choice.positions[at]);
  return kept_row(shape, shape.kept(change.before.kept_capacity), change.before[Part::kKept], head,
                  source);
}

/** Lists the rows to choose from, and what attention the last queries pay to each of them. */
void observe(const Kernels& kernels, ThreadPool& pool, const ModelShape& shape,
             const ObserveRules& rules, const KeptChange& change, const Choice& choice);

/**
 * Marks a head's best rows as chosen, ties to the lower one; without a say the latest ones.
 * Overwrites its ranks.
 * @param share  ranks are divided by that first
 */
void take_best(const Choice& choice, int64_t head, int64_t keep, uint64_t share);

/** Fills a head's part of a block: the chosen rows, then rows that lost too few choices. */
void fill_kept(const ModelShape& shape, const KeptChange& change, const Choice& choice,
               int64_t head, int64_t patience);

/** The same of a zone that was cut: the kept rows that are left. */
void trim_kept(const ModelShape& shape, const KeptChange& change, int64_t head);

/** The positions that the kv heads of a sequence keep: attended to, or held. */
std::vector<std::vector<int32_t>> kept_positions(const ModelShape& shape,
                                                 const SequenceView& sequence, bool held);

}  // namespace pariskv::cpu
