/** PRKV on a GPU: digests of pages, choices of kept rows, steps over both. */
#pragma once

#include "kept/memory.h"
#include "policy/prkv/policy.h"
#include "prkv/calls.h"
#include "prkv/decode/call.h"
#include "slots.h"

namespace pariskv::cuda {

class PRKVSearch final : public PRKVPolicy {
 public:
  PRKVSearch(CudaBackend& backend, const PRKV& settings, const Config& config,
             const ModelShape& shape);

  void remember(const RememberArgs& args, Stream stream) override;
  void reserve_choice(const std::vector<KeptChange>& changes) override;
  void choose(const std::vector<KeptChange>& changes, Stream stream) override;
  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  DecodeCounts counts() override { return counters_.read(); }
  int64_t scratch_bytes() const override { return slots_.scratch_bytes() + choices_.bytes(); }
  void clear_scratch(Stream stream) override;

 private:
  void digest(const DigestArgs& args, Stream stream) override;
  PRKVTrace trace(const DecodeArgs& args, Stream stream) override;

  void prepare(KeptSlot& slot, Block& scratch, const SequenceView& sequence) const;
  PageDecodeCall call_of(const DecodeArgs& args) const;
  void add_pages(const SequenceView& sequence, int64_t head, PRKVTrace& trace);

  CudaBackend& backend_;
  SlotTable<KeptSlot> slots_;
  Counters counters_;
  ChoiceMemory choices_;
  Event bus_;  // a choice has the keys that it looks at
};

}  // namespace pariskv::cuda
