// Chunks of a device's memory beside blocks of other sizes.
#include <gtest/gtest.h>

#include <memory>

#include "chunks.h"
#include "memory/heap.h"

namespace pariskv::cuda {
namespace {

constexpr std::size_t kAlignment = 64, kChunk = 1 << 10, kLeast = 4 * kChunk;

TEST(Chunks, MakeWayForWhatABudgetRefused) {
  const auto heap = heap_resource();
  Chunks chunks(heap, heap, kChunk, kLeast, kLeast, /*budget=*/32 * kChunk);
  // More than the budget: others may come until what is in use is too much.
  ASSERT_TRUE(chunks.hold(38 * kChunk));
  chunks.hold(0);
  EXPECT_EQ(chunks.allocate(kChunk + 1, kAlignment), nullptr) << "pieces without chunks can go";
  chunks.make_way();
  void* const other = chunks.allocate(kChunk + 1, kAlignment);
  ASSERT_NE(other, nullptr);
  chunks.deallocate(other, kChunk + 1, kAlignment);
}

}  // namespace
}  // namespace pariskv::cuda
