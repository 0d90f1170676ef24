/**
 * HARD-KV on the CPU: which rows of a zone are kept. A decode step has nothing to find; the kept
 * rows are attended to with the resident ones.
 */
#pragma once

#include "cpu/step.h"
#include "policy/hardkv/policy.h"

namespace pariskv::cpu {

class HardKVSearch final : public CpuSearch<HardKVPolicy> {
 public:
  using CpuSearch::CpuSearch;

  void reserve_choice(const std::vector<KeptChange>& changes) override;
  void choose(const std::vector<KeptChange>& changes, Stream stream) override;

 private:
  HardKVTrace trace(const DecodeArgs& args) override;
  void find(const DecodeArgs& args, const Running& running) override;
};

}  // namespace pariskv::cpu
