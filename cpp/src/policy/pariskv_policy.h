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

  int64_t state_bytes() const override;
  bool searches(int64_t total, int64_t zone_tokens) const override;
  void on_spill(const EncodeJob* jobs, int64_t count, Stream stream) override;
  void on_recall(const EncodeJob* jobs, int64_t count, Stream stream) override;
  void reserve(const SequenceView* sequences, int64_t count, Arena& arena) override;
  const SelectTrace& select(const SelectArgs& args, Stream stream) override;
  KeyStatistics statistics(void* state) const override;
  int64_t workspace_bytes() const override { return workspace_.bytes(); }

 private:
  SearchItem cut_item(const SequenceView& sequence, Cutter& cutter) const;
  int64_t searchers() const;

  const Config& config_;
  ModelShape shape_;
  Backend& backend_;
  Codec codec_;
  Workspace workspace_;
  SelectTrace trace_;
};

}  // namespace pariskv
