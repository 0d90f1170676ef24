/**
 * ParisKV: 85 bytes per key, a coarse scan over all of them, a rerank of a few percent, the best
 * rows by their worth to the group. The part that every device shares; a device encodes and
 * searches.
 */
#pragma once

#include "backend/memory.h"
#include "pariskv/config.h"
#include "policy/pariskv/jobs.h"
#include "policy/pariskv/rules.h"
#include "policy/pariskv/trace.h"
#include "search.h"

namespace pariskv {

class ParisKVPolicy : public Search {
 public:
  /**
   * @param settings, memory  outlive it
   * @param crossings         see StepRules; of no tokens: lengths alone decide
   */
  ParisKVPolicy(const ParisKV& settings, const Config& config, const ModelShape& shape,
                BackendMemory& memory, const Crossings& crossings = {});

  bool plan(SequenceView& sequence) const override;
  void observe(const std::vector<QuerySpan>& spans, Stream stream) override;
  void enter(const std::vector<Span>& spans, Stream stream) override;
  void leave(const Span& span, Stream stream) override;
  void explain(const DecodeArgs& args, Stream stream, Explanation& explanation) override;
  Summaries summaries(const SequenceView& sequence) const override;
  void clear_outside(uint8_t* segment, int64_t begin, int64_t end) const override;
  int64_t unusable_keys(const SequenceView& sequence) const override;

 protected:
  /** Adds the squares of queries of a prompt. */
  virtual void add_queries(const ObserveArgs& args, Stream stream) = 0;
  /** Keys that enter zones: rows to summaries, and their statistics added. */
  virtual void encode(const EncodeArgs& args, Stream stream) = 0;
  /** Keys that leave zones: their statistics taken off again. */
  virtual void forget(const EncodeArgs& args, Stream stream) = 0;
  /** The path of a search for the first sequence; returns when it is known. */
  virtual ParisKVTrace trace(const DecodeArgs& args, Stream stream) = 0;

  const Codec codec_;
  const ParisKVRules rules_;

 private:
  EncodeJob job_of(const Span& span) const;

  const ParisKV& settings_;
  BackendMemory& memory_;
};

}  // namespace pariskv
