#include "tail.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "tail_seeds.h"

namespace pariskv {
namespace {

constexpr uint32_t kTailSeed = Tail::seed_of(42);

/** The coin of an interval of a level, as docs/search.md defines it. */
bool takes_right_half(uint32_t seed, int level, uint32_t interval) {
  const uint32_t group = uint32_t(level - 1) / 5, depth = 4 - uint32_t(level - 1) % 5;
  uint32_t x = ((group << 27) + (interval >> depth)) ^ seed;
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  x ^= x >> 16;
  return x >> ((1u << depth) + (interval & ((1u << depth) - 1))) & 1;
}

/** All positions are drawn at level 0; each level keeps one of two. */
std::vector<int64_t> drawn_from_below(uint32_t seed, int level, int64_t positions) {
  std::vector<int64_t> drawn;
  for (int64_t p = 0; p < positions; ++p) drawn.push_back(p);
  for (int at = 1; at <= level; ++at) {
    std::vector<int64_t> next;
    for (size_t s = 0; 2 * s + 1 < drawn.size(); ++s) {
      next.push_back(drawn[2 * s + size_t(takes_right_half(seed, at, uint32_t(s)))]);
    }
    drawn = next;
  }
  return drawn;
}

std::vector<int64_t> tail_positions(const Tail& tail) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < tail.count; ++i) positions.push_back(tail.position(i));
  return positions;
}

TEST(TailTest, rows_are_those_of_the_definition) {
  std::mt19937 random(1);
  const auto up_to = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (int round = 0; round < 200; ++round) {
    const uint32_t seed = Tail::seed_of(uint64_t(up_to(1000)));
    const int64_t begin = up_to(300), end = begin + 1 + up_to(round < 190 ? 5000 : 200000);
    const int64_t rows = 16 + up_to(60);
    const Tail tail = Tail::of(begin, end, rows, seed);
    std::vector<int64_t> expected;
    int level = -1;
    do {
      ++level;
      // The last interval as a whole, which may be cut off by the zone.
      expected = drawn_from_below(seed, level, (end | ((int64_t{1} << level) - 1)) + 1);
      const auto outside = [&](int64_t p) { return p < begin || p >= end; };
      expected.erase(std::remove_if(expected.begin(), expected.end(), outside), expected.end());
    } while (int64_t(expected.size()) > 2 * rows);
    ASSERT_EQ(tail.bits, level);
    ASSERT_EQ(tail_positions(tail), expected);
    ASSERT_GE(tail.count, std::min(rows, end - begin));
    ASSERT_FLOAT_EQ(tail.weight(end - begin), float(end - begin) / float(expected.size()));
  }
}

TEST(TailTest, a_zone_of_millions_has_one_row_of_each_interval) {
  for (const int64_t rows : {int64_t{16}, int64_t{1024}, int64_t{8192}}) {
    const Tail tail = Tail::of(4, (int64_t{1} << 23) - 77, rows, kTailSeed);
    ASSERT_GE(tail.count, rows);
    ASSERT_LE(tail.count, Tail::capacity(rows));
    for (int64_t i = 0; i < tail.count; ++i) {
      ASSERT_EQ(tail.position(i) >> tail.bits, tail.first + i);
    }
  }
}

TEST(TailTest, it_knows_its_positions_and_no_other_ones) {
  for (const int64_t end : {int64_t{90}, int64_t{1000}, int64_t{4099}, int64_t{70000}}) {
    const Tail tail = Tail::of(4, end, 32, kTailSeed);
    int64_t next = 0;
    for (int64_t p = 4; p < end; ++p) {
      const bool is_next = next < tail.count && tail.position(next) == p;
      ASSERT_EQ(tail.has(p), is_next) << p;
      if (is_next) ASSERT_EQ(tail.number(p), next++);
    }
    ASSERT_EQ(next, tail.count);
  }
}

TEST(TailTest, longer_intervals_give_every_second_row_and_no_other_one) {
  const Tail shortest = Tail::of(4, 4000, 2000, kTailSeed);
  ASSERT_EQ(shortest.bits, 0);
  for (int64_t bits = 1; bits < 12; ++bits) {
    Tail longer = shortest, one = shortest;
    longer.bits = bits, one.bits = bits - 1;
    for (int64_t s = 0; s < 40; ++s) {
      longer.first = s, one.first = 2 * s;
      ASSERT_TRUE(longer.position(0) == one.position(0) || longer.position(0) == one.position(1));
    }
  }
}

TEST(TailTest, a_zone_that_grows_or_is_cut_has_the_same_rows) {
  Tail before = Tail::of(4, 5, 16, kTailSeed);
  for (int64_t end = 6; end < 3000; ++end) {
    const Tail tail = Tail::of(4, end, 16, kTailSeed);
    ASSERT_GE(tail.bits, before.bits);
    ASSERT_EQ(tail.shares_rows(before), tail.bits == before.bits);
    if (tail.shares_rows(before)) {
      ASSERT_GE(tail.count, before.count);
      ASSERT_EQ(tail.count_to(end - 1), before.count);
      for (int64_t i = 0; i < before.count; ++i) {
        ASSERT_EQ(tail.position(i), before.position(i));
      }
    } else {
      for (int64_t i = 0; i < tail.count; ++i) {
        ASSERT_TRUE(tail.position(i) == end - 1 || before.has(tail.position(i)));
      }
    }
    before = tail;
  }
  EXPECT_EQ(before.count_to(4), 0);
  EXPECT_EQ(before.count_to(0), 0);
}

TEST(TailTest, every_position_of_an_interval_is_drawn_as_often_over_seeds) {
  constexpr int kSeeds = 6400;
  for (const int64_t bits : {int64_t{3}, int64_t{6}, int64_t{7}}) {
    const int64_t size = int64_t{1} << bits;
    for (const int64_t interval : {0, 1, 77}) {
      std::vector<int> times(size_t(size), 0);
      for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        const Tail tail{bits, interval, 1, Tail::seed_of(seed)};
        ++times[size_t(tail.position(0) - interval * size)];
      }
      const double chance = 1.0 / double(size);
      const double sigma = std::sqrt(kSeeds * chance * (1 - chance));
      int beyond = 0;
      for (const int count : times) beyond += std::abs(count - kSeeds * chance) > 3 * sigma;
      EXPECT_LE(beyond, size / 64) << bits << " bits, interval " << interval;  // 1 in 370 by chance
    }
  }
}

TEST(TailTest, nothing_is_drawn_where_nothing_is_left_out) {
  EXPECT_EQ(Tail::of(4, 4, 16, kTailSeed).count, 0);
  EXPECT_EQ(Tail::of(4, 3, 16, kTailSeed).count, 0);
  EXPECT_EQ(Tail::of(4, 400, 0, kTailSeed).count, 0);
  EXPECT_EQ(Tail::beside(396, 4, 400, 16, kTailSeed).count, 0);
  EXPECT_FALSE(Tail::beside(396, 4, 400, 16, kTailSeed).has(5));
  EXPECT_GT(Tail::beside(395, 4, 400, 16, kTailSeed).count, 15);
  const Tail all = Tail::of(4, 30, 16, kTailSeed);
  EXPECT_EQ(all.count, 26);
  EXPECT_EQ(all.weight(26), 1.0f);
}

TEST(TailSeedsTest, numbers_are_those_of_sip_hash) {
  // The eighth of the vectors that come with its specification: bytes 0 to 7, key 0 to 15.
  const SipKey key{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  EXPECT_EQ(sip_hash(key, 0x0706050403020100), 0x93f5f5799a932462);
}

TEST(TailSeedsTest, one_that_is_named_is_of_every_sequence) {
  TailSeeds seeds(kTailSeed);
  EXPECT_EQ(seeds.next(), kTailSeed);
  EXPECT_EQ(seeds.next(), kTailSeed);
}

TEST(TailSeedsTest, without_a_name_each_sequence_of_each_cache_has_its_own) {
  std::set<uint32_t> found;
  for (int cache = 0; cache < 4; ++cache) {
    TailSeeds seeds(std::nullopt);
    for (int i = 0; i < 50; ++i) found.insert(seeds.next());
  }
  EXPECT_GE(found.size(), 199u);  // two of 200 are equal once in 2^18 runs
}

}  // namespace
}  // namespace pariskv
