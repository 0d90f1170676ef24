/** A policy that keeps rows, on a GPU: the calls that HARD-KV and PRKV answer alike. */
#pragma once

#include <utility>

#include "kept/memory.h"
#include "kept/slots.h"
#include "slot_table.h"

namespace pariskv::cuda {

template <typename Policy>
class KeptSearch : public Policy {
 public:
  template <typename... Settings>
  explicit KeptSearch(CudaBackend& backend, Settings&&... settings)
      : Policy(std::forward<Settings>(settings)...),
        backend_(backend),
        slots_(backend),
        choices_(backend) {}

  void remember(const RememberArgs& args, Stream stream) override {
    cuda::remember(backend_, args, stream);
  }
  int64_t scratch_bytes() const override { return slots_.scratch_bytes() + choices_.taken(); }
  void clear_scratch(Stream stream) override {
    slots_.clear(stream);
    choices_.clear();
  }

 protected:
  CudaBackend& backend_;
  SlotTable<KeptSlot> slots_;
  ChoiceMemory choices_;
};

}  // namespace pariskv::cuda
