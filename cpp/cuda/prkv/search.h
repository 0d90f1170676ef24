/** PRKV on a GPU: digests of pages, choices of kept rows, steps over both. */
#pragma once

#include "kept/search.h"
#include "policy/prkv/policy.h"
#include "prkv/calls.h"
#include "prkv/decode/call.h"

namespace pariskv::cuda {

class PRKVSearch final : public KeptSearch<PRKVPolicy> {
 public:
  PRKVSearch(CudaBackend& backend, const PRKV& settings, const Config& config,
             const ModelShape& shape);

  void reserve_choice(const std::vector<KeptChange>& changes) override;
  void choose(const std::vector<KeptChange>& changes, Stream stream) override;
  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  DecodeCounts counts() override { return counters_.read(); }

 private:
  void digest(const DigestArgs& args, Stream stream) override;
  PRKVTrace trace(const DecodeArgs& args, Stream stream) override;

  PageDecodeCall call_of(const DecodeArgs& args) const;
  void add_pages(const SequenceView& sequence, int64_t head, PRKVTrace& trace);

  Counters counters_;
  Event bus_;  // a choice has the keys that it looks at
};

}  // namespace pariskv::cuda
