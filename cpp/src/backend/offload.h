/** Copies of rows to host memory, on a stream of the backend's own, and rows that stay. */
#pragma once

#include <cstdint>

#include "memory/arena.h"
#include "ops.h"
#include "pariskv/stream.h"

namespace pariskv {

class Offloads {
 public:
  virtual ~Offloads() = default;

  /** Starts a copy after all work given to `stream` so far; returns its ticket, above 0. */
  virtual int64_t start_offload(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  virtual bool offloaded(int64_t ticket) = 0;
  virtual void wait_offloaded(int64_t ticket) = 0;
  /** Keeps the blocks of a copy whose rows were dropped until the copy is done. */
  virtual void adopt(Block source, Block target, int64_t ticket) noexcept = 0;
};

}  // namespace pariskv
