/** Copies to host memory on a stream of their own, numbered in their order. */
#pragma once

#include <deque>
#include <vector>

#include "backend/offload.h"
#include "runtime.h"

namespace pariskv::cuda {

class Offload {
 public:
  /** Copies what `stream` will have written by now; returns the ticket of all these copies. */
  int64_t start(const std::vector<RowCopy>& copies, cudaStream_t stream);

  bool done(int64_t ticket);
  void wait(int64_t ticket);
  void wait_all() { wait(last_); }

 private:
  struct Copies {
    int64_t ticket;
    Event arrived;
  };
  Event take_event();

  OwnStream stream_;
  Event written_;
  std::deque<Copies> under_way_;  // oldest first
  std::vector<Event> spare_;
  int64_t last_ = 0;
};

}  // namespace pariskv::cuda
