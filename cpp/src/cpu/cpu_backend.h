/**
 * The CPU backend: every verb cuts its batch into tasks and hands the inner loops to the kernels of
 * this machine's instruction set. The verbs are in verbs/, searches in a folder for each policy.
 */
#pragma once

#include "backend/backend.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"

namespace pariskv::cpu {

class CpuBackend : public Backend {
 public:
  CpuBackend(const Config& config, const Resources& resources);

  /** A call that may be stopped between two verbs has to leave the present state as it is. */
  Capabilities capabilities() const override {
    Capabilities own;
    own.verbs_can_fail = stoppable_;
    return own;
  }

  std::unique_ptr<Search> make_search(const Config& config, const ModelShape& shape) override;

  void append(const RowsArgs& args, Stream stream) override;
  void read(const RowsArgs& args, Stream stream) override;
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override;
  void zero(void* target, int64_t bytes, Stream stream) override;
  void narrow(const NarrowArgs& args, Stream stream) override;
  void widen(const NarrowArgs& args, Stream stream) override;

  void attend_exact(const AttendExactArgs& args, Stream stream) override;
  void exact_logits(const ExactLogitsArgs& args, Stream stream) override;

  Arena& arena() override { return arena_; }
  int64_t scratch_bytes() const override { return 0; }  // searches have their own
  void clear_scratch(Stream) override {}
  void trim() override { arena_.trim(); }
  void fetch(void* target, const void* source, int64_t bytes) override;
  void parallel_for(int64_t count, const std::function<void(int64_t)>& work) override {
    pool_.parallel_for(count, work);
  }

 private:
  void touch(void* data, int64_t bytes);

  const Kernels& kernels_;
  const bool stoppable_;
  ThreadPool pool_;
  Arena arena_;
};

}  // namespace pariskv::cpu
