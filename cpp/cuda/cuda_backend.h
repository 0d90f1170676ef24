/**
 * The CUDA backend: memory, the order of calls, copies of rows to host memory, and the verbs that
 * every policy shares. Arguments become launches. Searches are in a folder for each policy.
 */
#pragma once

#include <vector>

#include "backend/backend.h"
#include "branches.h"
#include "check.h"
#include "device_memory.h"
#include "exact/exact_attention.h"
#include "kernels.h"
#include "offload.h"
#include "order.h"

namespace pariskv::cuda {

inline cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class CudaBackend : public Backend, public WordUpdates, public Offloads {
 public:
  CudaBackend(const Config& config, const Resources& resources);
  ~CudaBackend() override;

  void append(const RowsArgs& args, Stream stream) override;
  void read(const RowsArgs& args, Stream stream) override;
  void set_lengths(const PagedRows& table, const int32_t* lengths, int64_t count,
                   Stream stream) override;
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override;
  void zero(void* target, int64_t bytes, Stream stream) override;
  void narrow(const NarrowArgs& args, Stream stream) override;
  void widen(const NarrowArgs& args, Stream stream) override;
  void attend_exact(const AttendExactArgs& args, Stream stream) override;
  void exact_logits(const ExactLogitsArgs& args, Stream stream) override;

  Arena& arena() override { return arena_; }
  Arena* host_arena() override { return placement_ == Placement::kDevice ? nullptr : &host_arena_; }
  PageRange pages() override {
    return {memory_.pages(), memory_.page_bytes(), memory_.page_count()};
  }
  int64_t scratch_bytes() const override;
  void clear_scratch(Stream stream) override;
  bool keep_ready(int64_t bytes) override;
  void trim() override;
  void fetch(void* target, const void* source, int64_t bytes) override;

  bool capturing(Stream stream) override;
  void enter(Stream stream) override;
  void leave(Stream stream) noexcept override;
  void expect_replays(Stream stream) override { order_.replays_on(handle_of(stream)); }

  Capabilities capabilities() const override {
    Capabilities own;
    own.verbs_can_fail = true;
    own.graphs = true;
    own.decode_appends = true;
    own.own_memory = true;
    return own;
  }

  std::unique_ptr<Search> make_search(const Config& config, const ModelShape& shape) override;

  WordUpdates* word_updates() override { return this; }
  void update_word(void* target, uint64_t value) override;
  void send_words(Stream stream) override;
  void add_token(SequenceView* const* views, int64_t count, int64_t layers, Stream stream) override;

  Offloads* offloads() override { return this; }
  int64_t start_offload(const std::vector<RowCopy>& copies, Stream stream) override;
  bool offloaded(int64_t ticket) override;
  void wait_offloaded(int64_t ticket) override;
  void adopt(Block source, Block target, int64_t ticket) noexcept override;

  // For searches.

  int32_t device() const { return device_; }
  /** Rows of a zone leave for host memory. */
  bool rows_leave() const { return rows_leave_; }
  Branches& branches() { return branches_; }
  using Backend::zero;
  /** Many blocks at a time. */
  void zero(const std::vector<Cleared>& blocks, Stream stream);
  /** Memory that is zero before any call. */
  Block zeroed_block(int64_t bytes);

 private:
  struct Orphan {
    Block source, target;
    int64_t ticket;
  };

  void clear(void* data, int64_t bytes);
  void release_orphans(bool wait);
  void trim_waiting();

  const int32_t device_;
  const Placement placement_;
  bool rows_leave_;  // some of the zone may be in host memory
  DeviceMemory memory_;
  Arena arena_;
  Arena host_arena_;
  Order order_;
  Offload offload_;
  Branches branches_;
  ExactAttention exact_;
  std::vector<WordUpdate> updates_;
  std::vector<Orphan> orphans_;
};

}  // namespace pariskv::cuda
