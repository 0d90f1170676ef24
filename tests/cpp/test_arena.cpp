#include "memory/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "support.h"

#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace pariskv {
namespace {

using test::FailingResource;
using test::HoardingResource;

TEST(Arena, BlocksAreAlignedApartAndCounted) {
  Arena arena(heap_resource(), 0);
  std::vector<Block> blocks;
  int64_t live = 0;
  for (const int64_t bytes : {0, 1, 63, 64, 65, 1000, 4096, 200'000, 5'000'000}) {
    blocks.push_back(arena.allocate(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks.back().data()) % 64, 0u);
    EXPECT_EQ(blocks.back().bytes(), bytes);
    std::memset(blocks.back().data(), int(blocks.size()), size_t(bytes));
    live += std::max<int64_t>(64, (bytes + 63) / 64 * 64);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (int64_t b = 0; b < blocks[i].bytes(); b += 61) {
      ASSERT_EQ(blocks[i].as<char>()[b], char(i + 1));
    }
  }
  EXPECT_EQ(arena.use().live, live);
  EXPECT_EQ(arena.use().peak, live);
  EXPECT_GE(arena.use().reserved, live);
  blocks.clear();
  EXPECT_EQ(arena.use().live, 0);
  EXPECT_EQ(arena.use().reserved, 0);
  EXPECT_EQ(arena.use().peak, live);
}

TEST(Arena, SmallBlocksShareSlabsThatGoBackWhenEmpty) {
  const auto resource = std::make_shared<FailingResource>();
  Arena arena(resource, 0);
  std::vector<Block> blocks;
  for (int i = 0; i < 1000; ++i) blocks.push_back(arena.allocate(4000));
  EXPECT_LE(resource->calls, 5);  // 1000 blocks of 4 KB in slabs of 1 MB
  // A freed block is used again before a new slab is asked for.
  blocks[500] = Block();
  const int64_t calls = resource->calls;
  blocks[500] = arena.allocate(4000);
  EXPECT_EQ(resource->calls, calls);
  blocks.clear();
  EXPECT_EQ(resource->live, 0);
}

TEST(Arena, RefusalSaysWhatWasAskedAndWhatWasFree) {
  Arena arena(heap_resource(), 3'000'000);
  const Block held = arena.allocate(2'000'000);
  const MemoryUse before = arena.use();
  try {
    arena.allocate(1'000'064);
    FAIL() << "the budget should have refused";
  } catch (const OutOfMemory& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("1000064"), std::string::npos) << text;
    EXPECT_NE(text.find(" 1000000 of"), std::string::npos) << text;
  }
  EXPECT_EQ(arena.use().live, before.live);
  EXPECT_EQ(arena.use().reserved, before.reserved);
  EXPECT_EQ(arena.allocate(900'000).bytes(), 900'000);
}

TEST(Arena, ResourceMaySayNoEitherWay) {
  const auto resource = std::make_shared<FailingResource>();
  Arena arena(resource, 0);
  for (const int64_t call : {0, 1}) {  // one returns null, one throws
    resource->calls = call;
    resource->fail_at = call;
    EXPECT_THROW(arena.allocate(1'000'000), OutOfMemory);
    EXPECT_THROW((resource->calls = call, arena.allocate(100)), OutOfMemory);
    EXPECT_EQ(arena.use().reserved, 0);
  }
}

// Blocks of rows share slabs; these begin and end within pages.
TEST(Arena, FreedRowsAreZeroAndTheirNeighboursAsTheyWere) {
  constexpr int64_t kBytes = 100'096;
  Arena arena(heap_resource(), 0);
  std::vector<Block> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(arena.allocate(kBytes, Holds::kRows));
    std::memset(blocks.back().data(), i + 1, size_t(kBytes));
  }
  const char* middle = blocks[1].as<char>();
  blocks[1] = Block();
  const Block again = arena.allocate(kBytes, Holds::kRows);
  ASSERT_EQ(again.as<char>(), middle);
  EXPECT_EQ(std::count(middle, middle + kBytes, char(0)), kBytes);
  for (const int i : {0, 2}) {
    const char* data = blocks[size_t(i)].as<char>();
    EXPECT_EQ(std::count(data, data + kBytes, char(i + 1)), kBytes);
  }
}

#if defined(__linux__)
// A call that ends early gives back blocks that it has not come to write.
TEST(Arena, FreeingRowsThatNobodyWroteBringsNoneOfThemIn) {
  constexpr int64_t kBytes = int64_t{1} << 19;
  Arena arena(heap_resource(), 0);
  Block used = arena.allocate(kBytes, Holds::kRows);
  Block block = arena.allocate(kBytes, Holds::kRows);
  char* data = block.as<char>();
  block = Block();
  const auto page = size_t(sysconf(_SC_PAGESIZE));
  char* first = data + (page - size_t(uintptr_t(data)) % page) % page;
  std::vector<unsigned char> present(size_t(kBytes) / page);
  ASSERT_EQ(mincore(first, (present.size() - 1) * page, present.data()), 0);
  EXPECT_EQ(std::count_if(present.begin(), present.end(), [](auto p) { return p & 1; }), 0);
}
#endif

TEST(Arena, FreedBytesAreZero) {
  const auto resource = std::make_shared<HoardingResource>();
  Arena arena(resource, 0);
  constexpr uint32_t kCanary = 0xdeadbeef;
  for (const int64_t bytes : {64, 4096, 100'000, 3'000'000}) {
    Block block = arena.allocate(bytes);
    std::fill_n(block.as<uint32_t>(), bytes / 4, kCanary);
    EXPECT_EQ(resource->count(kCanary), bytes / 4);
    block = Block();
    EXPECT_EQ(resource->count(kCanary), 0);
  }
}

}  // namespace
}  // namespace pariskv
