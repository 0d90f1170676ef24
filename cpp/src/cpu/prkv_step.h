/**
 * PRKV on the CPU: digests of pages, which rows of a zone are kept, and which pages a step finds.
 * Kept rows are attended to with the resident ones.
 */
#pragma once

#include <vector>

#include "cpu/running.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "memory/arena.h"
#include "policy/upkeep.h"

namespace pariskv::cpu {

class PRKVStep {
 public:
  PRKVStep(const Kernels& kernels, ThreadPool& pool, const Block& scratch)
      : kernels_(kernels), pool_(pool), scratch_(scratch) {}

  void cut(const DecodeArgs& args, const PRKVRules& rules, const Selection& selection,
           Cutter& cutter);

  /** Selects the live rows of the best pages. */
  void search(const DecodeArgs& args, const PRKVRules& rules, const Running& running);
  void count(const ModelShape&, DecodeCounts&) const {}

  /** The rows that the first sequence of a step keeps, and the pages found for it. */
  Trace trace(const DecodeArgs& args, const PRKVRules& rules) const;

  void keep_up(const PRKVDigest& args);

  /** Of the scratch, that keep_up of this needs. */
  int64_t scratch_bytes(const PRKVKeep& args) const;
  void keep_up(const PRKVKeep& args);

 private:
  /** A sequence that pages are looked for in, and its arrays. */
  struct Item {
    SequenceView sequence;
    PRKVSplit split;
    int64_t row;         // in the batch
    int64_t first_page;  // of the zone
    int64_t pages;
    float* query;         // (heads, group, key_dim) the ones with a say first
    int64_t* asking;      // (heads) how many have
    float* scores;        // (heads, pages)
    uint64_t* order;      // (heads, pages) scratch of the choice, the best first
    uint64_t* live;       // (heads, pages) rows that may be selected
    int64_t* found;       // (heads) pages
    int32_t* selected;    // (heads, width) positions; part of Selection
    int64_t* selections;  // (heads) how many
    int64_t width;
  };

  void load_queries(const DecodeArgs& args, const Item& item, int64_t head);
  void score_segment(const DecodeArgs& args, const PRKVRules& rules, const Item& item, int64_t head,
                     int64_t segment);
  void find_pages(const DecodeArgs& args, const PRKVRules& rules, const Item& item, int64_t head);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const Block& scratch_;
  std::vector<Item> items_;  // of the last step, over the scratch
};

}  // namespace pariskv::cpu
