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
   * earlier work of `stream`, and later work of `stream` waits for all.
   */
  template <typename Run>
  void share(int64_t count, int64_t least, int64_t most, cudaStream_t stream, Run run) {
    const int64_t shares = std::clamp(count / least, int64_t{1}, most);
    each(shares, stream, [&](int64_t i, cudaStream_t branch) {
      run(count * i / shares, count * (i + 1) / shares, branch);
    });
  }

  /**
   * Calls `run(i, branch, stream)` for i in [0, count), each by turns in one of `most` branches at
   * most: 0 is `stream` itself. They begin and end as shares do.
   */
  template <typename Run>
  void take_turns(int64_t count, int64_t most, cudaStream_t stream, Run run) {
    const int64_t branches = std::min(count, most);
    const Join join{*this, stream};
    begin(branches, stream);
    for (int64_t i = 0; i < count; ++i) run(i, i % branches, branch(i % branches, stream));
    end(stream);
  }

 private:
  /** Calls `run(i, stream)` for i in [0, count). */
  template <typename Run>
  void each(int64_t count, cudaStream_t stream, Run run) {
    const Join join{*this, stream};
    begin(count, stream);
    for (int64_t i = count - 1; i >= 0; --i) run(i, branch(i, stream));
    end(stream);
  }

  cudaStream_t branch(int64_t i, cudaStream_t stream) {
    return i == 0 ? stream : cudaStream_t(sides_[size_t(i - 1)].stream);
  }
  void begin(int64_t count, cudaStream_t stream) {
    if (count > 1) begun_.record(stream);
    for (int64_t i = 1; i < count; ++i) {
      if (i > int64_t(sides_.size())) sides_.emplace_back();
      begun_.make_wait(branch(i, stream));
      ++under_way_;
    }
  }
  void end(cudaStream_t stream) {
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
  /** When something was refused: waits for the work under way all the same. */
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
