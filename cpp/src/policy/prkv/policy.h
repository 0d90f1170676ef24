/**
 * PRKV: a budget of rows is spent on rows that the last queries looked at most, chosen whenever
 * tokens enter a zone, and on pages of neighbours that are found for each query by their digests.
 * Nothing moves: a page whose rows are kept goes without these. The part that every device shares;
 * a device digests, chooses, and finds.
 */
#pragma once

#include "backend/memory.h"
#include "pariskv/config.h"
#include "policy/prkv/jobs.h"
#include "policy/prkv/rules.h"
#include "policy/prkv/trace.h"
#include "search.h"

namespace pariskv {

class PRKVPolicy : public Search {
 public:
  /** @param memory  outlives it */
  PRKVPolicy(const PRKV& settings, const Config& config, const ModelShape& shape,
             BackendMemory& memory);

  bool plan(SequenceView& sequence) const override;
  void enter(const std::vector<Span>& spans, Stream stream) override;
  void leave(const Span&, Stream) override {}
  int64_t kept_rows(int64_t zone_tokens) const override;
  int64_t bytes_beside_kept(int64_t capacity) const override;
  void explain(const DecodeArgs& args, Stream stream, Explanation& explanation) override;
  Summaries summaries(const SequenceView& sequence) const override;
  int64_t unusable_keys(const SequenceView& sequence) const override;

  /** Rows that a refresh looks at, at least: so zones of tests can be small. */
  void look_at_least(int64_t rows) { rules_.least_looked_at = rows; }

 protected:
  /** Pages that enter zones: rows to digests. */
  virtual void digest(const DigestArgs& args, Stream stream) = 0;
  /** The rows that the first sequence keeps and the pages found for it; returns when it is known.
   */
  virtual PRKVTrace trace(const DecodeArgs& args, Stream stream) = 0;

  PRKVRules rules_;

 private:
  BackendMemory& memory_;
};

}  // namespace pariskv
