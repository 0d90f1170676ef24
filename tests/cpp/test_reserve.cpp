// Memory that is taken ahead: as much as was asked for, touched, used first, and given back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/available.h"
#include "memory/touch.h"
#include "support.h"

namespace pariskv {
namespace {

using test::FailingResource;

constexpr int64_t kRows = 512 << 10, kSmall = 4096;  // of a block of its own, and of a slab

/** An arena that notes which bytes were touched. */
struct Reserved {
  std::shared_ptr<FailingResource> resource = std::make_shared<FailingResource>();
  int64_t touched = 0;
  Arena arena;

  explicit Reserved(int64_t budget, bool deferred = false)
      : arena(resource, budget, traits(deferred)) {}
  ArenaTraits traits(bool deferred) {
    ArenaTraits traits;
    traits.deferred = deferred;
    if (deferred) traits.largest_slab = 64 << 20;
    traits.touch = [this](void* data, int64_t bytes) {
      touch_pages(data, bytes);
      touched += bytes;
    };
    return traits;
  }
};

class Reserve : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OfDevicesAndOfTheHeap, Reserve, testing::Bool());

TEST_P(Reserve, TakesAndTouchesOnceAndServesFromThat) {
  Reserved of(0, GetParam());
  of.arena.reserve({{kRows, 300}, {kSmall, 1000}});
  const int64_t held = of.arena.use().reserved;
  EXPECT_GE(held, 300 * kRows + 1000 * kSmall);
  EXPECT_LE(held, 300 * kRows + 1000 * kSmall + (2 << 20));
  EXPECT_EQ(of.touched, held);
  EXPECT_EQ(of.arena.use().live, 0);
  const int64_t calls = of.resource->calls;
  of.arena.reserve({{kRows, 300}, {kSmall, 1000}});
  {
    std::vector<Block> blocks;
    for (int i = 0; i < 300; ++i) blocks.push_back(of.arena.allocate(kRows));
    for (int i = 0; i < 1000; ++i) blocks.push_back(of.arena.allocate(kSmall));
    for (Block& block : blocks) std::memset(block.data(), 1, size_t(block.bytes()));
    EXPECT_EQ(of.resource->calls, calls) << "something was taken anew";
  }
  for (const RetiredBlock& block : of.arena.take_retired()) {
    std::memset(block.data, 0, size_t(block.bytes));
    of.arena.recycle(&block, 1);
  }
  EXPECT_EQ(of.arena.use().reserved, held) << "it does not stay";
  const Block again = of.arena.allocate(kRows);
  EXPECT_EQ(std::count(again.as<char>(), again.as<char>() + kRows, 0), kRows);
}

TEST_P(Reserve, GoesWithTrimButForBlocksInUse) {
  Reserved of(0, GetParam());
  of.arena.reserve({{kRows, 200}});
  Block used = of.arena.allocate(kRows);
  of.arena.trim();
  EXPECT_GT(of.arena.use().reserved, 0);
  EXPECT_LT(of.arena.use().reserved, 200 * kRows);
  used = Block();
  for (const RetiredBlock& block : of.arena.take_retired()) of.arena.recycle(&block, 1);
  of.arena.trim();
  EXPECT_EQ(of.arena.use().reserved, 0);
}

TEST_P(Reserve, ABudgetIsNeverPassedAndNothingIsTakenThen) {
  Reserved of(100 * kRows, GetParam());
  const Block used = of.arena.allocate(kRows);
  const MemoryUse before = of.arena.use();
  try {
    of.arena.reserve({{kRows, 50}, {kSmall, 50 * kRows / kSmall}});
    FAIL();
  } catch (const OutOfMemory& error) {
    for (const char* part : {"[reserve] asked for ", "of the budget of 52428800 are free"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_NE(std::string(error.what()).find("reserve less or raise the budget"),
              std::string::npos);
  }
  EXPECT_EQ(of.arena.use().reserved, before.reserved);
  EXPECT_EQ(of.touched, 0);
  of.arena.reserve({{kRows, 90}});
  EXPECT_LE(of.arena.use().reserved, 100 * kRows);
}

TEST_P(Reserve, ARefusedSlabGivesTheOthersBack) {
  for (int64_t nth = 0; nth < 4; ++nth) {
    Reserved of(0, GetParam());
    of.resource->fail_at = of.resource->calls + nth;
    of.resource->forever = true;
    EXPECT_THROW(of.arena.reserve({{kRows, 1000}}), OutOfMemory);
    EXPECT_EQ(of.arena.use().reserved, 0);
  }
}

TEST(ReserveOnTheHeap, MakesWayForBlocksOfOtherSizes) {
  Reserved of(100 * kRows);
  of.arena.reserve({{kRows, 90}});
  const Block other = of.arena.allocate(50 * kRows + 64);
  EXPECT_LT(of.arena.use().reserved, 60 * kRows);
}

TEST(TouchPages, ReachesEveryPageWhateverTheSize) {
  for (const int64_t bytes : {1, 4096, 5000, 1 << 20, (8 << 20) + 1, (64 << 20) - 4096}) {
    std::vector<char> memory(size_t(bytes) + 64, 7);
    touch_pages(memory.data(), bytes);
    for (int64_t at = 0; at < bytes; at += 4096) ASSERT_EQ(memory[size_t(at)], 0) << bytes;
    EXPECT_EQ(std::count(memory.begin(), memory.end(), 0), (bytes + 4095) / 4096);
  }
}

Config reserving(int64_t budget) {
  Config config = test::small_config();
  config.layers = 2;
  config.memory_budget = budget;
  return config;
}

TEST(CacheReserve, PromptsAskForNothingMore) {
  const auto resource = std::make_shared<FailingResource>();
  Resources resources;
  resources.host = resource;
  Cache cache(reserving(0), resources);
  cache.reserve(3000, 3);
  const Stats empty = cache.stats();
  EXPECT_GT(empty.memory.reserved, 0);
  EXPECT_EQ(empty.memory.live, 0);
  const int64_t calls = resource->calls;
  cache.reserve(3000, 3);
  EXPECT_EQ(resource->calls, calls);
  for (int i = 0; i < 3; ++i) {
    const SequenceId sequence = cache.add();
    test::Rows rows(1000, 2, 64, 1);
    for (int64_t layer = 0; layer < 2; ++layer) {
      cache.prefill(layer, {sequence}, {1000}, rows.view(), rows.view());
    }
  }
  // Tails and states are no part of it.
  EXPECT_LE(cache.stats().memory.reserved, empty.memory.reserved + (4 << 20));
  for (const SequenceId sequence : cache.sequences()) cache.remove(sequence);
  EXPECT_GE(cache.stats().memory.reserved, empty.memory.reserved);
  cache.trim();
  EXPECT_EQ(cache.stats().memory.reserved, 0);
}

TEST(CacheReserve, NumbersThatDoNotFitAreRefusedInASentence) {
  Cache cache(reserving(8 << 20));
  const auto refused = [&](int64_t tokens, int64_t sequences, const char* text) {
    try {
      cache.reserve(tokens, sequences);
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      return;
    }
    ADD_FAILURE() << text;
  };
  refused(0, 1, "[reserve] tokens: expected 1 to 8388608, as many as 1 sequences can have, got 0");
  refused(9 << 20, 1, "[reserve] tokens: expected 1 to 8388608");
  refused(10, 0, "[reserve] sequences: expected 1 to 65536, got 0");
  refused(1 << 20, 1, "reserve less or raise the budget");
  EXPECT_EQ(cache.stats().memory.reserved, 0);
}

TEST(Reserve, AsksTheSystemBeforeAnythingIsTaken) {
  ArenaTraits traits;
  int64_t asked = 0;
  traits.check_ahead = [&](int64_t bytes) {
    asked = bytes;
    if (bytes > 5 << 20) throw OutOfMemory("[reserve] the system has less");
  };
  Arena arena(heap_resource(), 0, std::move(traits));
  EXPECT_THROW(arena.reserve({{4096, 5000}}), OutOfMemory);
  EXPECT_GE(asked, 5000 * 4096);
  EXPECT_EQ(arena.use().reserved, 0);
  arena.reserve({{4096, 1000}});
  EXPECT_GE(arena.use().reserved, 1000 * 4096);
  asked = 0;
  arena.reserve({{4096, 1000}});
  EXPECT_EQ(asked, 0) << "as much is free already";
}

TEST(Reserve, TheSystemHasSomeBytesAndNotAllThereAre) {
  const int64_t available = available_host_bytes();
  EXPECT_GT(available, 0);
  EXPECT_NO_THROW(check_available(available / 2));
  EXPECT_THROW(check_available(int64_t{1} << 60), OutOfMemory);
}

TEST(Reserve, OthersAreShortBelowAGigabyteAndAPartOfWhatIsHeld) {
  const std::string root = testing::TempDir() + "pariskv_shortage";
  std::filesystem::create_directories(root + "/proc");
  const auto lacking = [&](int64_t available_kb, int64_t held) {
    std::ofstream(root + "/proc/meminfo") << "MemAvailable: " << available_kb << " kB\n";
    return Shortage(root).bytes(held);
  };
  EXPECT_EQ(lacking(2 << 20, 0), 0);
  EXPECT_EQ(lacking(1 << 19, 0), int64_t{1} << 29);
  EXPECT_EQ(lacking(2 << 20, int64_t{64} << 30), int64_t{1} << 30);
  Shortage once(root);
  EXPECT_EQ(once.bytes(0), 0);
  EXPECT_EQ(once.bytes(int64_t{64} << 30), 0) << "it was asked a moment ago";
  std::filesystem::remove_all(root);
  EXPECT_EQ(Shortage(root).bytes(0), 0) << "a system that does not say";
}

}  // namespace
}  // namespace pariskv
