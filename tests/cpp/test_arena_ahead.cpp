// Slabs that a thread takes before anybody needs them, and gives back.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory/arena.h"
#include "support.h"

#if defined(__unix__)
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace pariskv {
namespace {

/** Tells threads apart, and keeps those that are not the test's waiting if told to. */
class WatchedResource : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (std::this_thread::get_id() == home_) {
      ++here;
    } else {
      ++elsewhere;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
      if (refuses) return nullptr;
    }
    live += int64_t(bytes);
    return upstream_->allocate(bytes, alignment);
  }
  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    live -= int64_t(bytes);
    upstream_->deallocate(data, bytes, alignment);
  }

  void open(bool open) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  /** Until another thread has asked so many times in all. */
  bool asked(int64_t times) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return elsewhere >= times; });
  }

  std::atomic<int64_t> here{0}, elsewhere{0}, live{0};  // calls, calls, bytes
  std::atomic<bool> refuses{false};

 private:
  const std::thread::id home_ = std::this_thread::get_id();
  const std::shared_ptr<MemoryResource> upstream_ = heap_resource();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

constexpr int64_t kAheadBlock = 1 << 20;

ArenaTraits traits_ahead() {
  ArenaTraits traits;
  traits.largest_slab = 4 << 20;
  traits.deferred = true;
  traits.ahead = 128 << 20;
  return traits;
}

/** Lets the thread ahead do what it has been asked for. */
void tend(Arena& arena, WatchedResource& resource, int64_t asked) {
  arena.tend();
  ASSERT_TRUE(resource.asked(asked));
  for (int i = 0; i < 20'000 && resource.live < arena.use().reserved && !resource.refuses; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(ArenaAhead, OnlyTheFirstSlabIsWaitedFor) {
  const auto resource = std::make_shared<WatchedResource>();
  {
    Arena arena(resource, 0, traits_ahead());
    arena.tend();
    std::vector<Block> blocks;
    for (int i = 0; i < 60; ++i) {
      blocks.push_back(arena.allocate(kAheadBlock));
      for (int turn = 0; turn < 4; ++turn) {
        arena.tend();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    EXPECT_EQ(resource->here, 1);
    EXPECT_GE(resource->elsewhere, 59 / 4);
    EXPECT_LE(arena.use().reserved, 2 * arena.use().live + (8 << 20));
    EXPECT_EQ(arena.use().live, 60 * kAheadBlock);
  }
  EXPECT_EQ(resource->live, 0);
}

TEST(ArenaAhead, ASlabOnItsWayIsAwaitedNotRequestedAgain) {
  const auto resource = std::make_shared<WatchedResource>();
  Arena arena(resource, 0, traits_ahead());
  const Block first = arena.allocate(kAheadBlock);
  resource->open(false);
  arena.tend();
  ASSERT_TRUE(resource->asked(1));
  EXPECT_GT(arena.use().reserved, kAheadBlock) << "what is on its way counts";
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    resource->open(true);
  });
  const Block second = arena.allocate(kAheadBlock);
  opener.join();
  EXPECT_EQ(resource->here, 1);
}

TEST(ArenaAhead, ARefusedSlabAheadIsReportedOnlyWhenNeeded) {
  const auto resource = std::make_shared<WatchedResource>();
  Arena arena(resource, 0, traits_ahead());
  const Block first = arena.allocate(kAheadBlock);
  resource->refuses = true;
  tend(arena, *resource, 1);
  const Block second = arena.allocate(kAheadBlock);  // asks for itself
  EXPECT_EQ(resource->here, 2);
  EXPECT_EQ(arena.use().reserved, resource->live);
  for (int i = 0; i < 10; ++i) arena.tend();
  EXPECT_EQ(resource->elsewhere, 1) << "it keeps asking in vain";
}

TEST(ArenaAhead, TheBudgetHoldsAndComesFirst) {
  const auto resource = std::make_shared<WatchedResource>();
  ArenaTraits traits = traits_ahead();
  traits.reclaim = [] {};
  Arena arena(resource, 3 * kAheadBlock, traits);
  std::vector<Block> blocks;
  blocks.push_back(arena.allocate(kAheadBlock));
  tend(arena, *resource, 1);  // two blocks' worth: the budget is spent
  EXPECT_EQ(arena.use().reserved, 3 * kAheadBlock);
  // Who needs memory of another size gets what nobody uses yet.
  blocks.push_back(arena.allocate(2 * kAheadBlock));
  EXPECT_EQ(arena.use().reserved, 3 * kAheadBlock);
  const int64_t asked = resource->elsewhere;
  arena.tend();
  EXPECT_THROW(arena.allocate(kAheadBlock), OutOfMemory);
  EXPECT_EQ(resource->elsewhere, asked) << "asked for what the budget has no room for";
}

TEST(ArenaAhead, TrimmingAndEndingWaitForTheThread) {
  const auto resource = std::make_shared<WatchedResource>();
  bool ending = false;
  ArenaTraits traits = traits_ahead();
  traits.clear = [&](void*, int64_t) { EXPECT_FALSE(ending) << "what clears may be gone by now"; };
  {
    Arena arena(resource, 0, traits);
    for (int round = 0; round < 20; ++round) {
      const Block block = arena.allocate(kAheadBlock);
      arena.tend();
      arena.trim();
      EXPECT_EQ(arena.use().reserved, resource->live);
    }
    const Block block = arena.allocate(kAheadBlock);
    arena.tend();
    ending = true;
  }
  EXPECT_EQ(resource->live, 0);
}

TEST(ArenaAhead, WhatIsReservedBehindCountsAtOnceAndComesFromTheThread) {
  const auto resource = std::make_shared<WatchedResource>();
  {
    Arena arena(resource, 100 * kAheadBlock, traits_ahead());
    resource->open(false);
    arena.reserve_behind({{kAheadBlock, 60}});
    ASSERT_TRUE(resource->asked(1));
    EXPECT_EQ(arena.use().reserved, 60 * kAheadBlock);
    EXPECT_EQ(resource->live, 0);
    arena.reserve_behind({{kAheadBlock, 50}});
    EXPECT_EQ(arena.use().reserved, 60 * kAheadBlock) << "twice is once";
    EXPECT_THROW(arena.reserve_behind({{kAheadBlock, 101}}), OutOfMemory);
    EXPECT_EQ(arena.use().reserved, 60 * kAheadBlock);
    resource->open(true);
    std::vector<Block> blocks;
    for (int i = 0; i < 60; ++i) blocks.push_back(arena.allocate(kAheadBlock));
    EXPECT_EQ(resource->here, 0) << "waits for what is on its way";
    EXPECT_EQ(arena.use().reserved, resource->live);
    blocks.clear();
    for (const RetiredBlock& block : arena.take_retired()) arena.recycle(&block, 1);
    EXPECT_GE(arena.use().reserved, 60 * kAheadBlock) << "it does not stay";
  }
  EXPECT_EQ(resource->live, 0);
}

TEST(ArenaAhead, WhereTheSystemRunsShortWhatNobodyUsesGoesBack) {
  const auto resource = std::make_shared<WatchedResource>();
  int64_t lacking = 0, held = 0;
  ArenaTraits traits = traits_ahead();
  traits.lacking = [&](int64_t reserved) { return held = reserved, lacking; };
  {
    Arena arena(resource, 0, traits);
    arena.reserve_behind({{kAheadBlock, 60}});
    EXPECT_EQ(arena.use().coming, 60 * kAheadBlock);
    const Block used = arena.allocate(kAheadBlock);
    for (int i = 0; i < 1000 && arena.use().coming > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      arena.tend();
    }
    EXPECT_EQ(arena.use().coming, 0);
    EXPECT_EQ(arena.use().reserved, 60 * kAheadBlock);
    lacking = 20 * kAheadBlock;
    arena.tend();
    EXPECT_EQ(held, 60 * kAheadBlock);
    EXPECT_LE(arena.use().reserved, 40 * kAheadBlock);
    EXPECT_GE(arena.use().reserved, 20 * kAheadBlock) << "more than was lacking";
    // What is on its way and not begun is called off, and nothing is taken ahead meanwhile.
    resource->open(false);
    arena.reserve_behind({{kAheadBlock, 200}});
    lacking = 1000 * kAheadBlock;
    arena.tend();
    EXPECT_LE(arena.use().coming, 32 * kAheadBlock);
    resource->open(true);
    for (int i = 0; i < 1000 && arena.use().coming > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      arena.tend();
    }
    arena.tend();
    EXPECT_LE(arena.use().reserved, 32 * kAheadBlock) << "the slab in use, and no other";
  }
  EXPECT_EQ(resource->live, 0);
}

TEST(ArenaAhead, OtherMemoryIsNotWaitedForAndComesFirst) {
  const auto resource = std::make_shared<WatchedResource>();
  ArenaTraits traits = traits_ahead();
  traits.reclaim = [] {};
  Arena arena(resource, 40 * kAheadBlock, traits);
  resource->open(false);
  arena.reserve_behind({{kAheadBlock, 30}});
  ASSERT_TRUE(resource->asked(1));
  const Block other = arena.allocate(2 * kAheadBlock);
  EXPECT_EQ(resource->here, 1);
  // Who finds no room gets what nobody uses yet, once the thread has ended its piece.
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    resource->open(true);
  });
  const Block large = arena.allocate(20 * kAheadBlock);
  opener.join();
  EXPECT_EQ(resource->elsewhere, 1) << "the rest is not asked for";
  EXPECT_EQ(arena.use().reserved, resource->live);
}

TEST(ArenaAhead, OfWhatTheResourceRefusesTheRestIsNotAskedFor) {
  const auto resource = std::make_shared<WatchedResource>();
  Arena arena(resource, 0, traits_ahead());
  resource->open(false);
  arena.reserve_behind({{kAheadBlock, 400}});
  ASSERT_TRUE(resource->asked(1));
  resource->refuses = true;
  resource->open(true);
  const Block mine = arena.allocate(kAheadBlock);  // asks for itself
  EXPECT_EQ(resource->here, 1);
  EXPECT_LE(resource->elsewhere, 100);
  arena.trim();
  EXPECT_EQ(arena.use().reserved, resource->live);
}

TEST(ArenaAhead, WhereNoThreadMayTakeItIsReservedAtOnce) {
  const auto resource = std::make_shared<WatchedResource>();
  ArenaTraits traits = traits_ahead();
  traits.ahead = 0;
  Arena arena(resource, 0, traits);
  arena.reserve_behind({{kAheadBlock, 10}});
  EXPECT_EQ(resource->elsewhere, 0);
  EXPECT_EQ(resource->live, 10 * kAheadBlock);
}

TEST(ArenaAhead, NewSlabsAreClearedOnEveryPath) {
  const auto resource = std::make_shared<WatchedResource>();
  int64_t cleared = 0;
  ArenaTraits traits = traits_ahead();
  traits.clear = [&](void* data, int64_t bytes) {
    std::memset(data, 0, size_t(bytes));
    cleared += bytes;
  };
  Arena arena(resource, 0, traits);
  std::vector<Block> blocks;
  for (int i = 0; i < 10; ++i) {
    blocks.push_back(arena.allocate(kAheadBlock));
    EXPECT_EQ(std::count(blocks[i].as<char>(), blocks[i].as<char>() + kAheadBlock, 0), kAheadBlock);
    tend(arena, *resource, 1);
  }
  arena.tend();
  EXPECT_LE(10 * kAheadBlock, cleared);
  // A slab that cannot be cleared is nobody's.
  traits.clear = [](void*, int64_t) { throw std::runtime_error("the device is gone"); };
  Arena broken(resource, 0, traits);
  EXPECT_THROW(broken.allocate(kAheadBlock), std::runtime_error);
  EXPECT_EQ(broken.use().reserved, 0);
}

#if defined(__unix__)
TEST(ArenaAhead, AForkedChildNeitherHangsNorJoins) {
  const auto resource = std::make_shared<WatchedResource>();
  auto arena = std::make_unique<Arena>(resource, 0, traits_ahead());
  const Block first = arena->allocate(kAheadBlock);
  resource->open(false);
  arena->tend();
  ASSERT_TRUE(resource->asked(1));
  // The thread has let go of the resource's mutex while it waits, as a driver's would not have to.
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const Block mine = arena->allocate(kAheadBlock);  // nobody brings it: asks for itself
    arena->tend();
    arena->trim();
    const_cast<Block&>(first) = Block();
    const_cast<Block&>(mine) = Block();
    arena.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  resource->open(true);
  arena->trim();
  EXPECT_EQ(resource->here, 1);
}
#endif

}  // namespace
}  // namespace pariskv
