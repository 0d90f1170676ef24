#include "order.h"

#include <algorithm>

namespace pariskv::cuda {

void Order::enter(cudaStream_t stream) {
  if (last_call_ && stream != last_stream_) last_call_->hold_back(stream);
  if (replays_elsewhere(stream)) {
    note_replays();
    replayed_.hold_back(stream);
  }
  last_stream_ = stream;
  inside_ = true;
  recycle(false);
  if (!upkeep_news_) return;
  upkeep_done_.record(upkeep_);
  upkeep_done_.hold_back(stream);
  upkeep_news_ = false;
}

void Order::leave(cudaStream_t stream) noexcept {
  inside_ = false;
  try {
    last_call_ = mark(stream);
    // The next replay comes after this call, as the next call would.
    if (replays_elsewhere(stream)) last_call_->hold_back(replay_stream_);
    collect(last_call_);
  } catch (const std::exception&) {
    return;  // what was freed stays out of use: the device has failed, or the host's memory
  }
}

void Order::replays_on(cudaStream_t stream) noexcept {
  replay_stream_ = stream;
  replays_ = true;
}

bool Order::replays_run() const noexcept {
  if (!replays_) return false;
  // A stream that records does not run what it is given: it has no part in the order.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return succeeded(cudaStreamIsCapturing(replay_stream_, &status)) &&
         status == cudaStreamCaptureStatusNone;
}

void Order::note_replays() noexcept {
  try {
    replayed_.record(replay_stream_);
  } catch (const std::exception&) {
    return;  // a stream that is gone has nothing left to wait for
  }
}

std::shared_ptr<Event> Order::mark(cudaStream_t stream) {
  auto unused = std::find_if(marks_.begin(), marks_.end(),
                             [](const auto& event) { return event.use_count() == 1; });
  if (unused == marks_.end()) unused = marks_.insert(unused, std::make_shared<Event>());
  (*unused)->record(stream);
  return *unused;
}

void Order::collect(const std::shared_ptr<Event>& last_use) {
  std::vector<std::vector<RetiredBlock>> blocks;
  bool any = false;
  for (Arena* arena : arenas_) {
    blocks.push_back(arena->take_retired());
    any = any || !blocks.back().empty();
  }
  if (any) retired_.push_back({last_use, std::move(blocks)});
}

void Order::recycle(bool wait) {
  if (wait && (inside_ || last_call_)) collect(mark(last_stream_));
  size_t done = 0;
  for (; done < retired_.size(); ++done) {
    const Retired& retired = retired_[done];
    if (wait) retired.last_use->wait();
    if (!retired.last_use->passed()) break;
    recycle_all(retired.blocks);
  }
  retired_.erase(retired_.begin(), retired_.begin() + std::ptrdiff_t(done));
  if (wait) check(cudaStreamSynchronize(upkeep_), "wait for memory to be zeroed");
}

void Order::recycle_all(const std::vector<std::vector<RetiredBlock>>& blocks) {
  for (size_t a = 0; a < arenas_.size(); ++a) {
    for (const RetiredBlock& block : blocks[a]) {
      check(cudaMemsetAsync(block.data, 0, size_t(block.bytes), upkeep_), "zero freed memory");
      arenas_[a]->recycle(block);
      upkeep_news_ = true;
    }
  }
}

void Order::clear(void* data, int64_t bytes) {
  check(cudaMemsetAsync(data, 0, size_t(bytes), inside_ ? last_stream_ : upkeep_),
        "zero new memory");
  if (!inside_) upkeep_news_ = true;
}

void Order::wait() {
  if (last_call_) last_call_->wait();
  if (replays_run()) {
    note_replays();
    replayed_.wait();
  }
  check(cudaStreamSynchronize(upkeep_), "wait for memory to be zeroed");
}

void Order::finish() {
  for (const Retired& retired : retired_) recycle_all(retired.blocks);
  retired_.clear();
  std::vector<std::vector<RetiredBlock>> rest;
  for (Arena* arena : arenas_) rest.push_back(arena->take_retired());
  recycle_all(rest);
  check(cudaStreamSynchronize(upkeep_), "wait for memory to be zeroed");
}

}  // namespace pariskv::cuda
