/** Copies to host memory on a stream of their own, numbered in their order. */
#pragma once

#include <deque>
#include <vector>

#include "runtime.h"

namespace pariskv::cuda {

class Offload {
 public:
  /** Copies all that `stream` will have written by now; returns the copy's ticket. */
  int64_t start(void* target, const void* source, int64_t bytes, cudaStream_t stream);

  bool done(int64_t ticket);
  void wait(int64_t ticket);
  void wait_all() { wait(last_); }

 private:
  struct Copy {
    int64_t ticket;
    Event arrived;
  };
  Event take_event();

  OwnStream stream_;
  Event written_;
  std::deque<Copy> under_way_;  // oldest first
  std::vector<Event> spare_;
  int64_t last_ = 0;
};

}  // namespace pariskv::cuda
