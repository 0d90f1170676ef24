#include "order.h"

#include <algorithm>

namespace pariskv::cuda {

void Order::enter(cudaStream_t stream) {
  if (called_ && stream != last_stream_) {
    // Anew, for graphs may have been replayed there since.
    last_call_.record(last_stream_);
    last_call_.hold_back(stream);
  }
  recycle(false);
  if (!upkeep_news_) return;
  upkeep_done_.record(upkeep_);
  upkeep_done_.hold_back(stream);
  upkeep_news_ = false;
}

void Order::leave(cudaStream_t stream) noexcept {
  try {
    last_stream_ = stream;
    called_ = true;
    last_call_.record(stream);
    collect(stream);
  } catch (const std::exception&) {
    return;  // what was freed stays out of use: the device has failed, or the host's memory
  }
}

void Order::collect(cudaStream_t stream) {
  std::vector<std::vector<RetiredBlock>> blocks;
  bool any = false;
  for (Arena* arena : arenas_) {
    blocks.push_back(arena->take_retired());
    any = any || !blocks.back().empty();
  }
  if (!any) return;
  Retired retired{Event(), std::move(blocks)};
  retired.last_use.record(stream);
  retired_.push_back(std::move(retired));
}

void Order::recycle(bool wait) {
  size_t done = 0;
  for (; done < retired_.size(); ++done) {
    const Retired& retired = retired_[done];
    if (wait) retired.last_use.wait();
    if (!retired.last_use.passed()) break;
    for (size_t a = 0; a < arenas_.size(); ++a) {
      for (const RetiredBlock& block : retired.blocks[a]) {
        check(cudaMemsetAsync(block.data, 0, size_t(block.bytes), upkeep_), "zero freed memory");
        arenas_[a]->recycle(block);
        upkeep_news_ = true;
      }
    }
  }
  retired_.erase(retired_.begin(), retired_.begin() + std::ptrdiff_t(done));
  if (wait) check(cudaStreamSynchronize(upkeep_), "wait for memory to be zeroed");
}

void Order::wait() {
  if (called_) {
    last_call_.record(last_stream_);
    last_call_.wait();
  }
  check(cudaStreamSynchronize(upkeep_), "wait for memory to be zeroed");
}

}  // namespace pariskv::cuda
