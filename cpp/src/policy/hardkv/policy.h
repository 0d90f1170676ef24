/**
 * HARD-KV: it searches for nothing. Whenever tokens enter a zone, each kv head keeps as many rows
 * as the last queries needed for a share p of their attention, and attends to these until the next
 * time. The part that every device shares; a device chooses and attends.
 */
#pragma once

#include "pariskv/config.h"
#include "policy/hardkv/rules.h"
#include "policy/hardkv/trace.h"
#include "search.h"

namespace pariskv {

class HardKVPolicy : public Search {
 public:
  HardKVPolicy(const HardKV& settings, const Config& config, const ModelShape& shape);

  bool plan(SequenceView& sequence) const override;
  void enter(const std::vector<Span>&, Stream) override {}
  void leave(const Span&, Stream) override {}
  int64_t kept_rows(int64_t zone_tokens) const override;
  void explain(const DecodeArgs& args, Stream stream, Explanation& explanation) override;

 protected:
  /** What the first sequence keeps. */
  virtual HardKVTrace trace(const DecodeArgs& args) = 0;

  const HardKVRules rules_;

 private:
};

}  // namespace pariskv
