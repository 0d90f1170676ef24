/**
 * HARD-KV on the CPU: which rows of a zone are kept. A decode step has nothing to search for; the
 * kept rows are attended to with the resident ones.
 */
#pragma once

#include "cpu/running.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "memory/arena.h"
#include "policy/upkeep.h"

namespace pariskv::cpu {

class HardKvStep {
 public:
  HardKvStep(const Kernels& kernels, ThreadPool& pool, const Block& scratch)
      : kernels_(kernels), pool_(pool), scratch_(scratch) {}

  void cut(const DecodeArgs&, const HardKvRules&, const Selection&, Cutter&) {}

  /** Selects nothing. */
  void search(const DecodeArgs& args, const HardKvRules& rules, const Running& running);
  void count(const ModelShape&, DecodeCounts&) const {}

  /** What the first sequence of a step keeps. */
  Trace trace(const DecodeArgs& args, const HardKvRules& rules) const;

  /** Of the scratch, that keep_up of this needs. */
  int64_t scratch_bytes(const HardKvKeep& args) const;
  void keep_up(const HardKvKeep& args);

 private:
  const Kernels& kernels_;
  ThreadPool& pool_;
  const Block& scratch_;
};

}  // namespace pariskv::cpu
