// Attention in whole numbers: weights, shares, how many rows have a share p, and a ring of queries.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "kept.h"
#include "observe.h"
#include "recent.h"

namespace pariskv {
namespace {

TEST(Observe, WeightsHalveWithEveryOctaveAndNeverRise) {
  for (int32_t below = 0; below < 64 * 30; ++below) {
    const double exact = std::exp2(kWeightBits - below / 64.0);
    EXPECT_NEAR(weight_of(below), exact, 1 + exact * 1e-7) << below;
    EXPECT_LE(weight_of(below + 1), weight_of(below));
  }
  EXPECT_EQ(weight_of(0), 1u << kWeightBits);
  EXPECT_EQ(weight_of(64), 1u << (kWeightBits - 1));
  EXPECT_EQ(weight_of(INT32_MAX), 0u);
}

TEST(Observe, SharesOfAnyNumberOfRowsAddUpToNearlyOne) {
  for (const int64_t rows : {1, 2, 1000, 1 << 23}) {
    const uint64_t reciprocal = reciprocal_of(uint64_t(rows) << kWeightBits);
    const double sum = double(share_of(1u << kWeightBits, reciprocal)) * double(rows);
    const double one = double(uint64_t{1} << kShareBits);
    EXPECT_LE(sum, one);
    EXPECT_GE(sum, one * (1 - 1e-3)) << rows;
  }
  EXPECT_EQ(share_of(1u << kWeightBits, reciprocal_of(0)), 0u);
}

/** The same, one by one. */
int64_t counted(std::vector<uint64_t> shares, double p) {
  std::sort(shares.rbegin(), shares.rend());
  const uint64_t all = std::accumulate(shares.begin(), shares.end(), uint64_t{0});
  const auto units = uint64_t(std::nearbyint(p * (1 << kTopPBits)));
  int64_t count = 0;
  for (uint64_t sum = 0; (sum << kTopPBits) < all * units; ++count) sum += shares[size_t(count)];
  return count;
}

TEST(Observe, TopPCountIsTheLeastThatHasTheShare) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<uint64_t> shares(1 + random() % 300);
    const int spread = int(random() % 35);  // 0: a plateau
    for (uint64_t& share : shares) share = spread == 0 ? 5 : random() >> (64 - spread);
    for (const double p : {1e-6, .1, .5, .9, .999}) {
      const int64_t expected = counted(shares, p);
      for (const int64_t most : {int64_t{1}, int64_t{40}, int64_t{1000}}) {
        std::vector<uint64_t> copy = shares;
        const auto units = uint32_t(std::nearbyint(p * (1 << kTopPBits)));
        EXPECT_EQ(top_p_count(copy.data(), int64_t(copy.size()), units, most),
                  std::min(expected, most));
      }
    }
  }
}

TEST(Observe, ThreeOfTheseEightHaveNineTenths) {
  // softmax of (4, 0, 1, 3, -1, .5, 2, 0), of which the largest three have .924
  std::vector<uint64_t> shares;
  for (const double share : {.6148, .0113, .0306, .2262, .0041, .0186, .0832, .0113}) {
    shares.push_back(uint64_t(share * double(uint64_t{1} << kShareBits)));
  }
  EXPECT_EQ(top_p_count(shares.data(), 8, uint32_t(.9 * (1 << kTopPBits)), 8), 3);
}

TEST(Recent, AHeadTakesItsNumbersAndOneScale) {
  const RecentLayout layout{32, 32, 128};
  EXPECT_EQ(layout.bytes(), 32 * (8 + 32 * 136));
  std::vector<int64_t> block(size_t(layout.bytes()) / 8);
  auto* data = reinterpret_cast<char*>(block.data());
  float query[128] = {};
  query[0] = -2.0f, query[127] = 1.0f;
  round_query(query, 128, .5f, 3.0f, layout.scale(data, 31, 31), layout.numbers(data, 31, 31));
  const RecentScale& scale = *layout.scale(data, 31, 31);
  EXPECT_EQ(scale.unit, steps_per_unit(.5f, 2.0f));
  EXPECT_EQ(scale.most, int32_t(std::nearbyint(3.0 * 92.3324826)));
  EXPECT_EQ(layout.numbers(data, 31, 31)[0], -127);
  EXPECT_EQ(layout.numbers(data, 31, 31)[127], 64);  // 63.5: halves to even
  EXPECT_EQ(layout.numbers(data, 31, 31) + 128, reinterpret_cast<int8_t*>(data) + layout.bytes());

  query[5] = INFINITY;
  round_query(query, 128, .5f, 0.0f, layout.scale(data, 0, 0), layout.numbers(data, 0, 0));
  EXPECT_TRUE(std::isnan(layout.scale(data, 0, 0)->unit));
}

TEST(Kept, PartsOfABlockLieOneBehindTheOther) {
  const KeptLayout layout{8, 100, 512};
  std::vector<char> block(size_t(layout.bytes()) + 1);
  char* start = block.data();
  EXPECT_EQ(reinterpret_cast<char*>(layout.counts(start, 8)) - start, layout.positions_offset());
  EXPECT_EQ(reinterpret_cast<char*>(layout.positions(start, 8)) - start, layout.ages_offset());
  EXPECT_LE(reinterpret_cast<char*>(layout.ages(start, 8)) - start, layout.rows_offset());
  EXPECT_EQ(layout.rows_offset() % 64, 0);
  EXPECT_EQ(layout.row(start, 8, 0) - start, layout.bytes());
}

}  // namespace
}  // namespace pariskv
