/**
 * The HARD-KV policy: it searches for nothing. Whenever tokens enter a zone, each kv head keeps as
 * many rows as the last queries needed for a share p of their attention, and attends to these until
 * the next time.
 */
#pragma once

#include "policy/policy.h"

namespace pariskv {

class HardKVPolicy : public Policy {
 public:
  /** @param settings outlive the policy */
  HardKVPolicy(const HardKV& settings, int64_t dense_below, const ModelShape& shape,
               Backend& backend);

  int64_t summary_bytes() const override { return 0; }
  int64_t state_bytes() const override { return 0; }
  int64_t kept_rows(int64_t zone_tokens) const override;
  bool drops_rows() const override { return drops_; }
  void reserve_keep(const std::vector<KeptChange>& changes) override;
  void on_keep(const std::vector<KeptChange>& changes, Stream stream) override;
  void plan(SequenceView& sequence) const override;
  void on_spill(const std::vector<Span>&, Stream) override {}
  void on_recall(const Span&, Stream) override {}
  Rules rules() const override { return own_; }
  void explain(const Trace& trace, Explanation& explanation) const override;
  Summaries summaries(const SequenceView&) const override { return {}; }
  int64_t unusable_keys(const SequenceView&) const override { return 0; }
  void clear_outside(uint8_t*, int64_t, int64_t) const override {}
  bool fits_a_file() const override { return false; }  // kept rows and the ring have no place there

 private:
  HardKVKeep keep(const std::vector<KeptChange>& changes) const;

  const HardKVRules own_;
  const bool drops_;
  const int64_t dense_below_;
  const ModelShape shape_;
  Backend& backend_;
};

}  // namespace pariskv
