/** Copies of rows to host memory, on a stream of the backend's own, and rows that stay. */
#pragma once

#include <cstdint>
#include <vector>

#include "memory/arena.h"
#include "ops.h"
#include "pariskv/stream.h"

namespace pariskv {

class Offloads {
 public:
  virtual ~Offloads() = default;

  /** Starts copies after all work given to `stream` so far; returns their ticket, above 0. */
  virtual int64_t start_offload(const std::vector<RowCopy>& copies, Stream stream) = 0;
  virtual bool offloaded(int64_t ticket) = 0;
  virtual void wait_offloaded(int64_t ticket) = 0;
  /** Keeps the blocks of a copy whose rows were dropped until the copy is done. */
  virtual void adopt(Block source, Block target, int64_t ticket) noexcept = 0;
};

}  // namespace pariskv
