/**
 * The ParisKV policy: 83 bytes per key, a coarse scan over all of them, a rerank of a few
 * percent, the best rows by what they are worth to the group.
 */
#pragma once

#include "policy/policy.h"
#include "policy/workspace.h"

namespace pariskv {

class ParisKvPolicy : public Policy {
 public:
  ParisKvPolicy(const Config& config, const ModelShape& shape, Backend& backend);

  int64_t summary_bytes() const override { return shape_.summary().bytes(); }
  int64_t state_bytes() const override;
  int64_t width() const override { return config_.top_k; }
  bool searches(int64_t total, int64_t zone_tokens) const override;
  void on_spill(const Span& span, Stream stream) override;
  void on_recall(const Span& span, Stream stream) override;
  void reserve(const SequenceView* sequences, int64_t count, Arena& arena) override;
  SelectCounts select(const SelectArgs& args, Stream stream) override;
  void explain(Explanation& explanation) const override;
  Summaries summaries(const SequenceView& sequence) const override;
  int64_t unusable_keys(const SequenceView& sequence) const override;
  int64_t workspace_bytes() const override { return workspace_.bytes(); }
  void release() noexcept override { workspace_.release(); }

 private:
  /** Splits a state block. */
  KeyStatistics statistics(void* state) const;
  SearchItem cut_item(const SequenceView& sequence, Cutter& cutter) const;
  int64_t searchers() const;

  const Config& config_;
  ModelShape shape_;
  Backend& backend_;
  Codec codec_;
  Workspace workspace_;
  std::vector<SearchItem> items_;  // of the last selection, over the workspace
};

}  // namespace pariskv
