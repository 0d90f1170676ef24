#include "order.h"

#include <algorithm>

#include "kernels.h"

namespace pariskv::cuda {

void Order::enter(cudaStream_t stream) {
  const uint64_t id = stream_id(stream);
  if (last_call_ && id != last_id_) last_call_->make_wait(stream);
  if (replays_elsewhere(stream)) {
    note_replays();
    replayed_.make_wait(stream);
  }
  recycle(false);
  if (upkeep_news_) {
    upkeep_done_.record(upkeep_);
    upkeep_done_.make_wait(stream);
    upkeep_news_ = false;
  }
  last_stream_ = stream;
  last_id_ = id;
  inside_ = true;
}

void Order::leave(cudaStream_t stream) noexcept {
  inside_ = false;
  try {
    last_call_ = mark(stream);
    // The next replay comes after this call, as the next call would.
    if (replays_elsewhere(stream)) last_call_->make_wait(replay_stream_);
    collect(last_call_);
  } catch (const std::exception&) {
    // The next call cannot be ordered after this one, so wait for this one. Freed blocks are
    // collected with the next call.
    sync_ignoring_errors(stream);
  }
}

void Order::replays_on(cudaStream_t stream) noexcept {
  replay_stream_ = stream;
  replays_ = true;
}

bool Order::replays_run() const noexcept {
  if (!replays_) return false;
  // A stream that is being captured runs nothing: it has no part in the order.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return succeeded(cudaStreamIsCapturing(replay_stream_, &status)) &&
         status == cudaStreamCaptureStatusNone;
}

void Order::note_replays() noexcept {
  try {
    replayed_.record(replay_stream_);
  } catch (const std::exception&) {
    // Nothing can be ordered after these replays, so wait for them. A destroyed stream has none.
    sync_ignoring_errors(replay_stream_);
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
  // With room for them first: blocks that have been taken must not get lost.
  retired_.push_back({last_use, std::vector<std::vector<RetiredBlock>>(arenas_.size())});
  bool any = false;
  for (size_t a = 0; a < arenas_.size(); ++a) {
    retired_.back().blocks[a] = arenas_[a]->take_retired();
    any = any || !retired_.back().blocks[a].empty();
  }
  if (!any) retired_.pop_back();
}

void Order::recycle(bool wait) {
  // Between calls the last call comes after all work that is under way; its stream may be
  // destroyed by then.
  if (wait && (inside_ || last_call_)) {
    const std::shared_ptr<Event> last = inside_ ? mark(last_stream_) : last_call_;
    collect(last);
    last->wait();  // even if no block is retired: new memory may still be being zeroed
  }
  while (!retired_.empty()) {
    Retired& oldest = retired_.front();
    if (wait) oldest.last_use->wait();
    if (!oldest.last_use->passed()) break;
    recycle_all(oldest.blocks);
    retired_.pop_front();
  }
  if (wait) wait_for(upkeep_, "wait for memory to be zeroed");
}

/** Recycled blocks leave the list at once: the next ones may be refused, and tried again. */
void Order::recycle_all(std::vector<std::vector<RetiredBlock>>& blocks) {
  // Launches take longer than to zero a page or two, and a large block is zeroed best by itself.
  constexpr int64_t kLarge = int64_t{8} << 20;
  std::vector<Cleared> cleared;
  for (size_t a = 0; a < arenas_.size(); ++a) {
    std::vector<RetiredBlock>& left = blocks[a];
    while (!left.empty()) {
      cleared.clear();
      size_t first = left.size();
      while (first > 0 && cleared.size() < size_t(kMostCleared)) {
        const RetiredBlock& block = left[--first];
        if (block.bytes < kLarge) {
          cleared.push_back({block.data, block.bytes});
          continue;
        }
        check(cudaMemsetAsync(block.data, 0, size_t(block.bytes), upkeep_), "zero freed memory");
      }
      if (!cleared.empty()) launch_clear(cleared.data(), int64_t(cleared.size()), upkeep_);
      upkeep_news_ = true;
      arenas_[a]->recycle(left.data() + first, left.size() - first);
      left.resize(first);
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
  wait_for(upkeep_, "wait for memory to be zeroed");
}

void Order::finish() {
  for (Retired& retired : retired_) recycle_all(retired.blocks);
  retired_.clear();
  std::vector<std::vector<RetiredBlock>> rest;
  for (Arena* arena : arenas_) rest.push_back(arena->take_retired());
  recycle_all(rest);
  wait_for(upkeep_, "wait for memory to be zeroed");
}

}  // namespace pariskv::cuda
