// PRKV's parts: how a budget is split, and where the numbers of pages lie.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "policy/prkv/pages.h"

namespace pariskv {
namespace {

TEST(Pages, ABudgetIsSpentToTheLastRow) {
  for (const int64_t page : {8, 16, 32, 64}) {
    for (int64_t budget = page; budget < 5 * page; ++budget) {
      for (int64_t kept = 0; kept <= budget / page; ++kept) {
        const PRKVSplit split = PRKVSplit::of(budget, page, kept);
        EXPECT_EQ(split.pages, budget / page - kept);
        EXPECT_EQ(split.rows == 0, kept == 0);
        EXPECT_LE(split.rows + split.pages * page, budget);
        EXPECT_TRUE(kept == 0 || split.rows + split.pages * page == budget);
      }
    }
  }
  EXPECT_EQ(PRKVSplit::of(1024, 32, 8).rows, 256);  // the paper's
  EXPECT_EQ(PRKVSplit::of(1024, 32, 8).pages, 24);
  EXPECT_EQ(PRKVSplit::of(64, 32, 99).pages, 0);
}

TEST(Pages, ARefreshLooksAtAQuarterOfThem) {
  PRKVRules rules{1024, 32, 8, false};
  EXPECT_EQ(rules.looked_at(4096), 1024);
  EXPECT_EQ(rules.looked_at(4097), 1025);
  EXPECT_EQ(rules.looked_at(512), 256);  // 8,192 rows
  EXPECT_EQ(rules.looked_at(257), 256);
  EXPECT_EQ(rules.looked_at(256), 0);  // all
  rules.page = 8;
  EXPECT_EQ(rules.looked_at(4096), 1024);
  EXPECT_EQ(rules.looked_at(1024), 0);
  rules.page = 32, rules.static_pages = 32;  // kept rows alone: there are no digests
  EXPECT_EQ(rules.looked_at(4096), 0);
  rules.static_pages = PRKVRules::kAuto;
  EXPECT_EQ(rules.looked_at(4096), 1024);
}

TEST(Pages, PagesOfAZoneAreCountedFromTheSinks) {
  EXPECT_EQ(ZonePages::of(4, 64, 32).first, 0);
  EXPECT_EQ(ZonePages::of(4, 64, 32).count, 2);
  EXPECT_EQ(ZonePages::of(70, 96, 32).first, 2);
  EXPECT_EQ(ZonePages::of(70, 96, 32).count, 1);
}

ModelShape shape_of() {
  ModelShape shape{};
  shape.kv_heads = 3;
  shape.group = 2;
  shape.rows = RowFormat::plain(80, 64, DType::kBFloat16);
  shape.segment_tokens = 128;
  return shape;
}

/** Calls `take(begin, bytes)` for the numbers of every page of a layout. */
template <typename Take>
void each_number(const PageLayout& layout, char* block, Take take) {
  for (int64_t head = 0; head < layout.heads; ++head) {
    for (int64_t page = 0; page < layout.pages; ++page) {
      take(layout.live(block, head, page), 8);
      take(layout.unit(block, head, page), 4);
      take(layout.digest(block, head, page), 4 * layout.key_dim);
    }
  }
}

TEST(Pages, NumbersOfPagesLieApart) {
  const ModelShape shape = shape_of();
  const PageLayout layout = pages_of(shape, 32);
  EXPECT_EQ(layout.pages, 4);
  std::vector<uint64_t> block(size_t(layout.bytes()) / 8);
  std::set<int64_t> seen;
  auto* start = reinterpret_cast<char*>(block.data());
  each_number(layout, start, [&](void* begin, int64_t bytes) {
    const int64_t offset = static_cast<char*>(begin) - start;
    for (int64_t i = 0; i < bytes; ++i) EXPECT_TRUE(seen.insert(offset + i).second);
    EXPECT_LE(offset + bytes, layout.bytes());
  });
  EXPECT_EQ(reinterpret_cast<char*>(layout.digest(start, 0, 0)) - start, layout.digests_offset());
}

TEST(Pages, AmendedOnesLieBehindTheRows) {
  const ModelShape shape = shape_of();
  const AmendedLayout amended = amended_of(shape, 10);
  EXPECT_GE(amended.begin, shape.kept(10).bytes());
  std::vector<uint64_t> block(size_t(amended.begin + amended.bytes()) / 8);
  auto* start = reinterpret_cast<char*>(block.data());
  std::set<int64_t> seen;
  const auto take = [&](void* begin, int64_t bytes) {
    const int64_t offset = static_cast<char*>(begin) - start;
    for (int64_t i = 0; i < bytes; ++i) EXPECT_TRUE(seen.insert(offset + i).second);
    EXPECT_GE(offset, amended.begin);
    EXPECT_LE(offset + bytes, amended.begin + amended.bytes());
  };
  take(amended.split(start), sizeof(PRKVSplit));
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    take(amended.count(start, head), 8);
    take(amended.numbers(start, head), 8 * amended.capacity);
  }
  each_number(amended.pages(), amended.digests(start), take);
}

TEST(Pages, NumbersOfADigestAreThoseOfFloat16) {
  EXPECT_EQ(digest_number(0x0000), 0.0f);
  EXPECT_EQ(digest_number(0x0001), 0x1p-24f);
  EXPECT_EQ(digest_number(0x3c00), 1.0f);
  EXPECT_EQ(digest_number(0xc500), -5.0f);
  EXPECT_EQ(digest_number(0x7bff), 65504.0f);
}

}  // namespace
}  // namespace pariskv
