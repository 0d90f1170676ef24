/**
 * The search of a backend that has none: every zone is attended to in full, whatever the policy. It
 * needs attention alone, so a backend may begin with it; docs/add-a-backend.md.
 */
#pragma once

#include "backend/backend.h"
#include "search.h"

namespace pariskv {

class ExactSearch final : public Search {
 public:
  ExactSearch(const ModelShape& shape, Backend& backend)
      : Search(shape, Needs{}), backend_(backend) {}

  bool plan(SequenceView&) const override { return false; }
  void enter(const std::vector<Span>&, Stream) override {}
  void leave(const Span&, Stream) override {}
  void reserve(const DecodeArgs&) override {}
  void decode(const DecodeArgs& args, Stream stream) override;
  void explain(const DecodeArgs&, Stream, Explanation&) override {}
  DecodeCounts counts() override { return {}; }
  int64_t scratch_bytes() const override { return 0; }
  void clear_scratch(Stream) override {}

 private:
  Backend& backend_;
};

}  // namespace pariskv
