/**
 * The PRKV policy: a budget of rows is spent on rows that the last queries looked at most, chosen
 * whenever tokens enter a zone, and on pages of neighbours that are found for each query by their
 * digests. Nothing moves: a page whose rows are kept goes without these.
 */
#pragma once

#include "policy/policy.h"

namespace pariskv {

class PRKVPolicy : public Policy {
 public:
  PRKVPolicy(const PRKV& settings, int64_t dense_below, const ModelShape& shape, Backend& backend);

  int64_t summary_bytes() const override;
  int64_t state_bytes() const override { return 0; }
  int64_t grain() const override { return own_.page; }
  int64_t kept_rows(int64_t zone_tokens) const override;
  int64_t bytes_beside_kept(int64_t capacity) const override;
  bool waits_for_kept() const override { return !own_.has_pages(); }
  void reserve_keep(const std::vector<KeptChange>& changes) override;
  void on_keep(const std::vector<KeptChange>& changes, Stream stream) override;
  void plan(SequenceView& sequence) const override;
  void on_spill(const std::vector<Span>& spans, Stream stream) override;
  void on_recall(const Span&, Stream) override {}
  Rules rules() const override { return own_; }
  void explain(const Trace& trace, Explanation& explanation) const override;
  Summaries summaries(const SequenceView& sequence) const override;
  void clear_outside(uint8_t*, int64_t, int64_t) const override {}
  bool fits_a_file() const override { return false; }  // kept rows and the ring have no place there
  int64_t unusable_keys(const SequenceView& sequence) const override;

 private:
  PRKVKeep keep(const std::vector<KeptChange>& changes) const;

  const PRKVRules own_;
  const int64_t dense_below_;
  const ModelShape shape_;
  Backend& backend_;
};

}  // namespace pariskv
