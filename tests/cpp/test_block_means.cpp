// What keys have in common: the balance of channels, and the mean of a block in whole steps.
#include "policy/pariskv/codec/block_means.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace pariskv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Balanced {
  std::vector<float> stretch, gain;
};

Balanced balanced(std::vector<double> keys, std::vector<double> queries = {}) {
  Balanced out{std::vector<float>(keys.size(), 7), std::vector<float>(keys.size(), 7)};
  set_stretch(keys.data(), queries.empty() ? nullptr : queries.data(), int64_t(keys.size()),
              out.stretch.data(), out.gain.data());
  return out;
}

TEST(BlockMeans, StretchIsTheRootOfKeysOverQueries) {
  // Root mean squares: keys 1, 4, 9, 4; queries 1, 1, 1, 4. S is the root of their quotients.
  const Balanced with = balanced({1, 16, 81, 16}, {1, 1, 1, 16});
  // 1, 2, 3, 1: the median is the third of four by rank, 2.
  EXPECT_EQ(with.stretch, (std::vector<float>{0.5f, 1, 1.5f, 0.5f}));
  EXPECT_EQ(with.gain, (std::vector<float>{2, 1, 1 / 1.5f, 2}));
  // Without queries they are taken to be louder where keys are quieter: S = rms^(3/4).
  const Balanced without = balanced({1, 256, 1});
  EXPECT_EQ(without.stretch, (std::vector<float>{1, 8, 1}));
}

TEST(BlockMeans, UnitsOfKeysAndQueriesDoNotShow) {
  const std::vector<double> keys = {3, 1, 4, 1.5, 9}, queries = {2, 6, 5, 3, 5};
  const Balanced plain = balanced(keys, queries);
  for (const double size : {0x1p-200, 0x1p-20, 0x1p200}) {
    std::vector<double> more_keys = keys, more_queries = queries;
    for (double& key : more_keys) key *= size;
    EXPECT_EQ(balanced(more_keys, queries).stretch, plain.stretch) << size;
    for (double& query : more_queries) query *= size;
    EXPECT_EQ(balanced(keys, more_queries).stretch, plain.stretch) << size;
  }
}

TEST(BlockMeans, TheMedianIsOfAnyOrderAndOfTies) {
  EXPECT_EQ(balanced({1, 1, 1, 1}).stretch, std::vector<float>(4, 1.0f));
  const Balanced one = balanced({16, 1, 1, 1, 16}, {1, 1, 1, 1, 1});
  EXPECT_EQ(one.stretch, (std::vector<float>{2, 1, 1, 1, 2}));
  const Balanced other = balanced({16, 1, 16, 1, 16}, {1, 1, 1, 1, 1});
  EXPECT_EQ(other.stretch, (std::vector<float>{1, 0.5f, 1, 0.5f, 1}));
}

TEST(BlockMeans, StretchStaysWithinItsEnds) {
  // A channel counts as no quieter than 2^-20 of the loudest, as a square: 2^5 between stretches.
  const Balanced loud = balanced({1, 1, 1, 1e30, 1e-30}, {1, 1, 1, 1, 1});
  EXPECT_EQ(loud.stretch, (std::vector<float>{1, 1, 1, 32, 1}));
  const Balanced louder = balanced({1, 1, 1, 1e30, 1}, {1, 1, 1, 1e-30, 1});
  EXPECT_EQ(louder.stretch[3], float(kMostStretch));
  const Balanced quiet = balanced({1, 1, 1, 1, 0}, {1, 1, 1, 1, 1});
  EXPECT_EQ(quiet.stretch[4], float(kLeastStretch));
  const Balanced silent = balanced({1, 1, 1, 1, 1}, {1, 1, 1, 1, 0});
  EXPECT_EQ(silent.stretch[4], 32);
  for (size_t c = 0; c < 5; ++c) EXPECT_EQ(silent.gain[c], 1 / silent.stretch[c]);
}

TEST(BlockMeans, WhatSaysNothingBalancesNothing) {
  for (const double nothing : {0.0, kNan, kInfinity}) {
    std::vector<double> keys = {1, 16, 81};
    keys[1] = nothing;
    if (nothing == 0) keys.assign(3, 0);
    EXPECT_EQ(balanced(keys, {1, 1, 1}).stretch, std::vector<float>(3, 1.0f)) << nothing;
    EXPECT_EQ(balanced(keys, {1, 1, 1}).gain, std::vector<float>(3, 1.0f)) << nothing;
    std::vector<double> queries = {1, nothing, 1};
    if (nothing == 0) queries.assign(3, 0);
    EXPECT_EQ(balanced({1, 16, 81}, queries).stretch, balanced({1, 16, 81}).stretch) << nothing;
  }
}

TEST(BlockMeans, LevelsAreWholeStepsOfTheLargestChannel) {
  const float step = mean_step(254);
  EXPECT_EQ(step, 2);
  EXPECT_EQ(mean_level(254, step), 127);
  EXPECT_EQ(mean_level(-254, step), -127);
  EXPECT_EQ(mean_level(5, step), 2) << "halves to even";
  EXPECT_EQ(mean_level(-7, step), -4);
  EXPECT_EQ(mean_level(0.9, step), 0);
  EXPECT_EQ(mean_level(3, mean_step(0)), 0);
}

TEST(BlockMeans, AMeanOfAnySizeIsAFloat) {
  // Of keys of 3.4e38, in channels that are stretched by an eighth.
  const double largest = double(std::numeric_limits<float>::max()) / kLeastStretch;
  const float step = mean_step(largest);
  EXPECT_TRUE(std::isfinite(kMeanLevels * step));
  EXPECT_EQ(mean_level(largest, step), 127);
  EXPECT_EQ(mean_level(-largest, step), -127);
  const float tiny = mean_step(1e-44);  // a step under the least number is none
  EXPECT_EQ(mean_level(1e-44, tiny), tiny == 0 ? 0 : 127);
}

TEST(BlockMeans, ACentreHasFineSteps) {
  const float step = centre_step(2 * 16383.0);
  EXPECT_EQ(step, 2);
  EXPECT_EQ(centre_level(2 * 16383.0, step), 16383);
  EXPECT_EQ(centre_level(-1e300, step), -16383);
  EXPECT_EQ(centre_level(5, step), 2) << "halves to even";
  EXPECT_EQ(centre_level(3, centre_step(0)), 0);
  const double largest = double(std::numeric_limits<float>::max()) / kLeastStretch;
  EXPECT_TRUE(std::isfinite(kFineLevels * centre_step(largest)));
}

TEST(BlockMeans, LogitsOfACentreAndAMeanTogetherStayInBounds) {
  const int32_t most = int32_t(kMostSteps);
  EXPECT_EQ(joined_steps(5, -7), -2);
  EXPECT_EQ(joined_steps(most, 1), most);
  EXPECT_EQ(joined_steps(-most, -most), -most);
  EXPECT_EQ(joined_steps(most, -most), 0);
}

}  // namespace
}  // namespace pariskv
