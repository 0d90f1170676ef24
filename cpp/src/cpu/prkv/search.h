/**
 * PRKV on the CPU: digests of pages, which rows of a zone are kept, and which pages a step finds.
 * Kept rows are attended to with the resident ones.
 */
#pragma once

#include <vector>

#include "cpu/step.h"
#include "policy/prkv/policy.h"

namespace pariskv::cpu {

class PRKVSearch final : public CpuSearch<PRKVPolicy> {
 public:
  using CpuSearch::CpuSearch;

  void reserve_choice(const std::vector<KeptChange>& changes) override;
  void choose(const std::vector<KeptChange>& changes, Stream stream) override;

 private:
  /** A sequence that pages are looked for in, and its arrays. */
  struct Item {
    SequenceView sequence;
    PRKVSplit split;
    int64_t row;         // in the batch
    int64_t first_page;  // of the zone
    int64_t pages;
    float* query;         // (heads, group, key_dim) the finite ones first
    int64_t* asking;      // (heads) how many are
    float* scores;        // (heads, pages)
    uint64_t* order;      // (heads, pages) scratch of the choice, the best first
    uint64_t* live;       // (heads, pages) rows that may be selected
    int64_t* found;       // (heads) pages
    int32_t* selected;    // (heads, width) positions; part of Selection
    int64_t* selections;  // (heads) how many
    int64_t width;
  };

  void digest(const DigestArgs& args, Stream stream) override;
  PRKVTrace trace(const DecodeArgs& args, Stream stream) override;

  void cut(const DecodeArgs& args, const Selection& selection, Cutter& cutter) override;
  void find(const DecodeArgs& args, const Running& running) override;

  void load_queries(const DecodeArgs& args, const Item& item, int64_t head);
  void score_segment(const Item& item, int64_t head, int64_t segment);
  void find_pages(const Item& item, int64_t head);

  std::vector<Item> items_;  // of the last step, over the scratch
};

}  // namespace pariskv::cpu
