/** Work in several branches that need nothing of one another, beside a caller's stream. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "runtime.h"

namespace pariskv::cuda {

class Branches {
 public:
  /**
   * Calls `run(begin, end, stream)` for shares of `count` things, `most` at most and each of
   * `least` or more: the first on `stream`, the others on streams of their own. All begin after
   * what `stream` was given, and what it is given next waits for all.
   */
  template <typename Run>
  void share(int64_t count, int64_t least, int64_t most, cudaStream_t stream, Run run) {
    const int64_t shares = std::clamp(count / least, int64_t{1}, most);
    each(shares, stream, [&](int64_t i, cudaStream_t branch) {
      run(count * i / shares, count * (i + 1) / shares, branch);
    });
  }

 private:
  /** Calls `run(i, stream)` for i in [0, count). */
  template <typename Run>
  void each(int64_t count, cudaStream_t stream, Run run) {
    const Join join{*this, stream};
    if (count > 1) begun_.record(stream);
    for (int64_t i = 1; i < count; ++i) {
      if (i > int64_t(sides_.size())) sides_.emplace_back();
      begun_.make_wait(sides_[size_t(i - 1)].stream);
      ++under_way_;
      run(i, sides_[size_t(i - 1)].stream);
    }
    run(0, stream);
    for (; under_way_ > 0; --under_way_) {
      Side& side = sides_[under_way_ - 1];
      side.done.record(side.stream);
      side.done.make_wait(stream);
    }
  }

  struct Side {
    OwnStream stream;
    Event done;
  };
  /** When something was refused: what is under way is waited for all the same. */
  struct Join {
    Branches& branches;
    const cudaStream_t stream;
    ~Join() {
      for (size_t i = 0; i < branches.under_way_; ++i) {
        Side& side = branches.sides_[i];
        if (!succeeded(cudaEventRecord(side.done.handle(), side.stream)) ||
            !succeeded(cudaStreamWaitEvent(stream, side.done.handle(), 0))) {
          sync_ignoring_errors(side.stream);
        }
      }
      branches.under_way_ = 0;
    }
  };

  Event begun_;
  std::deque<Side> sides_;  // they stay where they are
  size_t under_way_ = 0;
};

}  // namespace pariskv::cuda
