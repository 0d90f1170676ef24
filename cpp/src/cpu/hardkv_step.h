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

class HardKVStep {
 public:
  HardKVStep(const Kernels& kernels, ThreadPool& pool, const Block& scratch)
      : kernels_(kernels), pool_(pool), scratch_(scratch) {}

  void cut(const DecodeArgs&, const HardKVRules&, const Selection&, Cutter&) {}

  /** Selects nothing. */
  void search(const DecodeArgs& args, const HardKVRules& rules, const Running& running);
  void count(const ModelShape&, DecodeCounts&) const {}

  /** What the first sequence of a step keeps. */
  Trace trace(const DecodeArgs& args, const HardKVRules& rules) const;

  /** Of the scratch, that keep_up of this needs. */
  int64_t scratch_bytes(const HardKVKeep& args) const;
  void keep_up(const HardKVKeep& args);

 private:
  const Kernels& kernels_;
  ThreadPool& pool_;
  const Block& scratch_;
};

}  // namespace pariskv::cpu
