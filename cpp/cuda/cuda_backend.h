/**
 * The CUDA backend: arguments become launches. It keeps two tables on the device beside what the
 * cache keeps there: a lane per row of a batch, and counters.
 */
#pragma once

#include <deque>

#include "backend/backend.h"
#include "branches.h"
#include "check.h"
#include "exact_attention.h"
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
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override;
  void zero(void* target, int64_t bytes, Stream stream) override;
  void remember(const RememberArgs& args, Stream stream) override;
  void reserve(const Upkeep& upkeep) override;
  void keep_up(const Upkeep& upkeep, Stream stream) override;

  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  Trace trace(const DecodeArgs& args, Stream stream) override;
  void attend_exact(const AttendExactArgs& args, Stream stream) override;
  void exact_logits(const ExactLogitsArgs& args, Stream stream) override;
  DecodeCounts counts() override;

  Arena& arena() override { return arena_; }
  Arena* host_arena() override { return offloads_ ? &host_arena_ : nullptr; }
  int64_t scratch_bytes() const override;
  void clear_scratch(Stream stream) override;
  void trim() override;
  void fetch(void* target, const void* source, int64_t bytes) override;

  bool capturing(Stream stream) override;
  void enter(Stream stream) override;
  void leave(Stream stream) noexcept override;
  void expect_replays(Stream stream) override { order_.replays_on(handle_of(stream)); }

  Capabilities capabilities() const override { return {true, true, true, true}; }

  WordUpdates* word_updates() override { return this; }
  void update_word(void* target, uint64_t value) override;
  void send_words(Stream stream) override;

  Offloads* offloads() override { return this; }
  int64_t start_offload(void* target, const void* source, int64_t bytes, Stream stream) override;
  bool offloaded(int64_t ticket) override;
  void wait_offloaded(int64_t ticket) override;
  void keep(const KeepArgs& args, Stream stream) override;
  void adopt(Block source, Block target, int64_t ticket) noexcept override;

 private:
  /** One row of a batch, as the host knows it. */
  struct HostLane {
    Lane sent{};
    Block scratch;
  };
  struct Orphan {
    Block source, target;
    int64_t ticket;
  };

  void keep_up(const ParisKVEncode& args, Stream stream);
  void keep_up(const ParisKVForget& args, Stream stream);
  void keep_up(const ParisKVObserve& args, Stream stream);

  /** Of the scratch of choices; other work needs none. */
  static int64_t choice_bytes(const HardKVKeep& args);
  static int64_t choice_bytes(const PRKVKeep& args);
  template <typename Args>
  static int64_t choice_bytes(const Args&) {
    return 0;
  }

  // PRKV's are in prkv_verbs.cpp, its steps in prkv_decode.cpp.
  void keep_up(const PRKVDigest& args, Stream stream);
  void keep_up(const PRKVKeep& args, Stream stream);
  void launch(const DecodeArgs& args, const PRKVRules& rules, Stream stream);
  void reserve_lane(int64_t row, const DecodeArgs& args, const PRKVRules& rules,
                    const SequenceView& sequence);
  Trace trace(const DecodeArgs& args, const PRKVRules& rules, Stream stream);
  void add_pages(const DecodeArgs& args, const PRKVRules& rules, int64_t head, PRKVTrace& trace);
  // HARD-KV's are in hardkv_verbs.cpp.
  void keep_up(const HardKVKeep& args, Stream stream);
  Trace trace(const DecodeArgs& args, const HardKVRules& rules, Stream stream);
  void launch(const DecodeArgs& args, const HardKVRules& rules, Stream stream);
  void reserve_lane(int64_t row, const DecodeArgs& args, const HardKVRules& rules,
                    const SequenceView& sequence);

  HostLane& host_lane(int64_t row);
  template <typename Rules>
  void reserve(const DecodeArgs& args, const Rules& rules);
  void reserve_lane(int64_t row, const DecodeArgs& args, const ParisKVRules& rules,
                    const SequenceView& sequence);
  void send_lane(int64_t row, const Lane& lane);
  DecodeCall call_of(const DecodeArgs& args, const ParisKVRules& rules) const;
  void launch(const DecodeArgs& args, const ParisKVRules& rules, Stream stream);
  Trace trace(const DecodeArgs& args, const ParisKVRules& rules, Stream stream);
  static constexpr int64_t kMostBatch = 4096;
  static void check_batch(int64_t batch);

  HeadTrace trace_head(const DecodeArgs& args, const ParisKVRules& rules, int64_t head);
  void release_orphans(bool wait);
  void trim_waiting();

  const int32_t device_;
  const bool offloads_;
  Arena arena_;
  Arena host_arena_;
  Order order_;
  Offload offload_;
  Branches branches_;
  ExactAttention exact_;
  Block lanes_;     // (kMostBatch) Lane, and one more to explain with
  Block counters_;  // DecodeCounts
  std::vector<HostLane> host_lanes_;
  HostLane explaining_;
  Block choices_;  // scratch of choices of kept rows
  Event bus_;      // a choice has the keys that it looks at
  std::vector<WordUpdate> updates_;
  std::vector<Orphan> orphans_;
};

}  // namespace pariskv::cuda
