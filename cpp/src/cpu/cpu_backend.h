/**
 * The CPU backend: every verb cuts its batch into tasks and hands the inner loops to the
 * kernels of this machine's instruction set. One file per verb in verbs/.
 */
#pragma once

#include "backend/backend.h"
#include "cpu/hardkv_step.h"
#include "cpu/pariskv_step.h"
#include "cpu/prkv_step.h"
#include "cpu/running.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"

namespace pariskv::cpu {

class CpuBackend : public Backend {
 public:
  CpuBackend(const Config& config, const Resources& resources);

  /** A call that may be stopped between two verbs has to leave the present state as it is. */
  Capabilities capabilities() const override { return {stoppable_, false, false, false, true}; }

  void append(const RowsArgs& args, Stream stream) override;
  void read(const RowsArgs& args, Stream stream) override;
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override;
  void zero(void* target, int64_t bytes, Stream stream) override;

  void keep(const KeepArgs& args, Stream stream) override;
  void remember(const RememberArgs& args, Stream stream) override;
  void reserve(const Upkeep& upkeep) override;
  void keep_up(const Upkeep& upkeep, Stream stream) override;

  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  Trace trace(const DecodeArgs& args, Stream stream) override;

  void attend_exact(const AttendExactArgs& args, Stream stream) override;
  void exact_logits(const ExactLogitsArgs& args, Stream stream) override;

  DecodeCounts counts() override { return counts_; }
  Arena& arena() override { return arena_; }
  int64_t scratch_bytes() const override { return scratch_.bytes(); }
  void clear_scratch(Stream) override { scratch_ = Block(); }  // zeroed as it goes
  void fetch(void* target, const void* source, int64_t bytes) override;
  void parallel_for(int64_t count, const std::function<void(int64_t)>& work) override {
    pool_.parallel_for(count, work);
  }

 private:
  /** The policy's own step: one overload for each alternative of Rules and of Upkeep. */
  ParisKVStep& step_of(const ParisKVRules&) { return pariskv_; }
  ParisKVStep& step_of(const EncodeArgs&) { return pariskv_; }
  ParisKVStep& step_of(const ParisKVObserve&) { return pariskv_; }
  HardKVStep& step_of(const HardKVRules&) { return hardkv_; }
  HardKVStep& step_of(const HardKVKeep&) { return hardkv_; }
  PRKVStep& step_of(const PRKVRules&) { return prkv_; }
  PRKVStep& step_of(const PRKVDigest&) { return prkv_; }
  PRKVStep& step_of(const PRKVKeep&) { return prkv_; }

  /** Grows the scratch, if it is smaller than that. */
  void reserve_scratch(int64_t bytes);

  /** Remembers the queries of a step's own tokens. */
  void remember_step(const DecodeArgs& args);

  /** Cuts the scratch of a decode, or measures it. */
  Running cut(const DecodeArgs& args, Cutter& cutter);

  void attend_resident(const DecodeArgs& args, const Running& running);
  void attend_selected(const DecodeArgs& args, const Running& running);

  const Kernels& kernels_;
  const bool stoppable_;
  ThreadPool pool_;
  Arena arena_;
  Block scratch_;
  ParisKVStep pariskv_;
  HardKVStep hardkv_;
  PRKVStep prkv_;
  DecodeCounts counts_;
};

}  // namespace pariskv::cpu
