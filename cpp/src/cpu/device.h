/** Kernels, threads and memory of the CPU's verbs and searches. */
#pragma once

#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"
#include "memory/arena.h"

namespace pariskv::cpu {

struct CpuDevice {
  const Kernels& kernels;
  ThreadPool& pool;
  Arena& arena;
};

/** Memory that verbs work in: it grows, and is cut up anew for every call. */
class Scratch {
 public:
  explicit Scratch(Arena& arena) : arena_(arena) {}

  void reserve(int64_t bytes);
  char* data() const { return block_.as<char>(); }
  int64_t bytes() const { return block_.bytes(); }
  int64_t taken() const { return block_.taken(); }
  void clear() { block_ = Block(); }  // zeroed as it goes

 private:
  Arena& arena_;
  Block block_;
};

}  // namespace pariskv::cpu
