/** A choice of kept rows on its way through the CPU's verbs: arrays that are cut from scratch. */
#pragma once

#include "cpu/running.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "policy/upkeep.h"

namespace pariskv::cpu {

constexpr uint8_t kNewcomer = 255;  // the age of a row that was not kept before

/** The arrays of a choice, cut from scratch. Those of queries and logits are one head's. */
struct Choice {
  int64_t width;          // rows per head, at most
  int16_t* numbers;       // (queries, key_dim) of the heads of queries that have a say
  RecentScale* scales;    // (queries)
  int32_t* offsets;       // (queries) logits of the reference, in steps
  int64_t* owner;         // (queries) number of the position that each is of
  int32_t* logits;        // (positions, width) in steps, the largest of the group; then weights
  uint64_t* reciprocals;  // (positions, 2) of the weights' sum, and of the pooled ones'
  int32_t* positions;     // (heads, width) of the rows, ascending
  uint8_t* ages;          // (heads, width) of rows that were kept, see kept.h; kNewcomer
  uint8_t*
      usable;  // (heads, width) the key is finite, and so is what is left without the reference
  uint64_t* shares;  // (heads, width) of the attention, summed over positions
  uint64_t* ranks;   // (heads, width) the metric, the same way; 0 without a say
  int64_t* counts;   // (heads) rows
  uint8_t* heard;    // (heads) some query had a say

  static Choice cut(const ModelShape& shape, int64_t width, Cutter& cutter) {
    const int64_t heads = shape.kv_heads, queries = shape.recent * shape.group;
    Choice out{};
    out.width = width;
    out.numbers = cutter.take<int16_t>(queries * shape.rows.key_dim);
    out.scales = cutter.take<RecentScale>(queries);
    out.offsets = cutter.take<int32_t>(queries);
    out.owner = cutter.take<int64_t>(queries);
    out.logits = cutter.take<int32_t>(shape.recent * width);
    out.reciprocals = cutter.take<uint64_t>(shape.recent * 2);
    out.positions = cutter.take<int32_t>(heads * width);
    out.ages = cutter.take<uint8_t>(heads * width);
    out.usable = cutter.take<uint8_t>(heads * width);
    out.shares = cutter.take<uint64_t>(heads * width);
    out.ranks = cutter.take<uint64_t>(heads * width);
    out.counts = cutter.take<int64_t>(heads);
    out.heard = cutter.take<uint8_t>(heads);
    return out;
  }
};

/** Lists the rows to choose from, and what attention the last queries pay to each of them. */
void observe(const Kernels& kernels, ThreadPool& pool, const HardKvKeep& args,
             const KeptChange& change, const Choice& choice);

}  // namespace pariskv::cpu
