/**
 * The order of calls on the device, and when freed memory may be used again.
 *
 * Calls may come on any stream; each is ordered after the one before. Freed blocks may still be
 * read by work that is under way: they are kept until that has passed, zeroed on a stream of our
 * own, and only then handed out again. The host never waits for it.
 */
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "memory/arena.h"
#include "runtime.h"

namespace pariskv::cuda {

class Order {
 public:
  /** @param arenas  their freed blocks are recycled; they outlive this */
  explicit Order(std::vector<Arena*> arenas) : arenas_(std::move(arenas)) {}

  void enter(cudaStream_t stream);
  void leave(cudaStream_t stream) noexcept;

  /** From now on graphs may be replayed on this stream, unseen by any call. */
  void replays_on(cudaStream_t stream) noexcept;

  /** Blocks that are no longer in use go back to their arenas; `wait` makes all of them pass. */
  void recycle(bool wait);

  /** Zeros new memory before the work of the present call. */
  void clear(void* data, int64_t bytes);

  /** Waits for all work of all calls. */
  void wait();

  /** Recycles everything: no work is under way any more. */
  void finish();

  /** The stream of our own, for work that belongs to no call. */
  cudaStream_t upkeep() const { return upkeep_; }

 private:
  struct Retired {
    std::shared_ptr<Event> last_use;
    std::vector<std::vector<RetiredBlock>> blocks;  // by arena
  };
  /** An event that is recorded now; reuses one without other owners. */
  std::shared_ptr<Event> mark(cudaStream_t stream);
  void collect(const std::shared_ptr<Event>& last_use);
  void note_replays() noexcept;
  bool replays_run() const noexcept;
  bool replays_elsewhere(cudaStream_t stream) const noexcept {
    return stream != replay_stream_ && replays_run();
  }
  void recycle_all(std::vector<std::vector<RetiredBlock>>& blocks);

  const std::vector<Arena*> arenas_;
  OwnStream upkeep_;
  Event upkeep_done_;
  bool upkeep_news_ = false;            // zeroing that no call has been ordered after yet
  std::shared_ptr<Event> last_call_;    // null: there was none
  cudaStream_t last_stream_ = nullptr;  // a caller's: there for the length of a call
  uint64_t last_id_ = 0;
  bool inside_ = false;  // of a call
  Event replayed_;
  cudaStream_t replay_stream_ = nullptr;
  bool replays_ = false;
  std::deque<Retired> retired_;  // oldest first
  std::vector<std::shared_ptr<Event>> marks_;
};

}  // namespace pariskv::cuda
