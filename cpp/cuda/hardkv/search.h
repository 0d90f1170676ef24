/** HARD-KV on a GPU: choices of kept rows, steps over them. */
#pragma once

#include "kept/decode/call.h"
#include "kept/memory.h"
#include "policy/hardkv/policy.h"
#include "slots.h"

namespace pariskv::cuda {

class HardKVSearch final : public HardKVPolicy {
 public:
  HardKVSearch(CudaBackend& backend, const HardKV& settings, const Config& config,
               const ModelShape& shape);

  void remember(const RememberArgs& args, Stream stream) override;
  void reserve_choice(const std::vector<KeptChange>& changes) override;
  void choose(const std::vector<KeptChange>& changes, Stream stream) override;
  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  DecodeCounts counts() override { return {}; }
  int64_t scratch_bytes() const override { return slots_.scratch_bytes() + choices_.bytes(); }
  void clear_scratch(Stream stream) override;

 private:
  HardKVTrace trace(const DecodeArgs& args) override;

  CudaBackend& backend_;
  SlotTable<KeptSlot> slots_;
  ChoiceMemory choices_;
};

}  // namespace pariskv::cuda
