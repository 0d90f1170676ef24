/**
 * The ParisKV policy: 85 bytes per key, a coarse scan over all of them, a rerank of a few
 * percent, the best rows by their worth to the group.
 */
#pragma once

#include "policy/policy.h"

namespace pariskv {

class ParisKVPolicy : public Policy {
 public:
  /** @param settings outlive the policy */
  ParisKVPolicy(const ParisKV& settings, int64_t sink, int64_t dense_below, const ModelShape& shape,
                Backend& backend);

  int64_t summary_bytes() const override { return codec_.layout.bytes(); }
  int64_t state_bytes() const override;
  int64_t grain() const override { return codec_.layout.block > 0 ? codec_.layout.block : 1; }
  int64_t opening() const override { return opening_; }
  Positions observed() const override;
  void on_queries(const std::vector<QuerySpan>& spans, Stream stream) override;
  int64_t tail_rows() const override;
  void plan(SequenceView& sequence) const override;
  void on_spill(const std::vector<Span>& spans, Stream stream) override;
  void on_recall(const Span& span, Stream stream) override;
  Rules rules() const override;
  void explain(const Trace& trace, Explanation& explanation) const override;
  Summaries summaries(const SequenceView& sequence) const override;
  void clear_outside(uint8_t* segment, int64_t begin, int64_t end) const override;
  int64_t unusable_keys(const SequenceView& sequence) const override;

 private:
  EncodeJob job_of(const Span& span) const;

  const ParisKV& settings_;
  const int64_t dense_below_;
  const ModelShape shape_;
  Backend& backend_;
  const Codec codec_;
  const int64_t opening_;  // 0 without blocks
};

}  // namespace pariskv
