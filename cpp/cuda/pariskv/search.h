/** ParisKV on a GPU. */
#pragma once

#include "kernels.h"
#include "policy/pariskv/policy.h"
#include "slot_table.h"
#include "tuning.h"

namespace pariskv::cuda {

class ParisKVSearch final : public ParisKVPolicy {
 public:
  ParisKVSearch(CudaBackend& backend, const ParisKV& settings, const Config& config,
                const ModelShape& shape);

  void copy_tail_rows(const TailCopyArgs& args, Stream stream) override;
  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  DecodeCounts counts() override { return counters_.read(); }
  int64_t scratch_bytes() const override { return slots_.scratch_bytes(); }
  void clear_scratch(Stream stream) override { slots_.clear(stream); }

 private:
  void add_queries(const ObserveArgs& args, Stream stream) override;
  void encode(const EncodeArgs& args, Stream stream) override;
  void forget(const EncodeArgs& args, Stream stream) override;
  ParisKVTrace trace(const DecodeArgs& args, Stream stream) override;

  DecodeCall call_of(const DecodeArgs& args) const;
  /** Searches so many sequences of a batch; recorded ones in branches. */
  void search(const DecodeCall& call, int64_t sequences, bool recorded, cudaStream_t on);
  void decode_paged(const DecodeArgs& args, bool recorded, cudaStream_t on);
  /** Where rows of a page table travel to; null: a step's slots have the first ones in order. */
  const int32_t* send_page_rows(const PagedRows& table, int64_t batch, cudaStream_t on);
  HeadTrace trace_head(const SequenceView& sequence, int64_t head);

  CudaBackend& backend_;
  const Tuning& tuning_;
  const CodecConstants constants_;
  SlotTable<ParisKVSlot> slots_;
  Counters counters_;  // and the searched rows of a step, see DecodeCall; then page rows
  OwnStream inner_;    // of recorded work that depends on a length
};

}  // namespace pariskv::cuda
