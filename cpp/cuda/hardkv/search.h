/** HARD-KV on a GPU: choices of kept rows, steps over them. */
#pragma once

#include "kept/decode/call.h"
#include "kept/search.h"
#include "policy/hardkv/policy.h"

namespace pariskv::cuda {

class HardKVSearch final : public KeptSearch<HardKVPolicy> {
 public:
  using KeptSearch::KeptSearch;

  void reserve_choice(const std::vector<KeptChange>& changes) override;
  void choose(const std::vector<KeptChange>& changes, Stream stream) override;
  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  DecodeCounts counts() override { return {}; }

 private:
  HardKVTrace trace(const DecodeArgs& args) override;
};

}  // namespace pariskv::cuda
