// The arithmetic behind the common scale of a group's scores.
#include "codec/head_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace pariskv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A line in the place of a logarithm or an exponential is so many octaves off.
constexpr float kLine = 0.0861f;

TEST(HeadScale, RoughLogarithmsAreLinesBetweenPowers) {
  for (int power = -100; power <= 100; ++power) {
    EXPECT_EQ(rough_log2(std::ldexp(1.0f, power)), float(power));
    EXPECT_EQ(rough_log2(std::ldexp(1.5f, power)), float(power) + 0.5f);
  }
  for (float x = 1; x < 1e6f; x *= 1.01f) {
    EXPECT_LE(rough_log2(x), std::log2(x) + 1e-5f);
    EXPECT_GE(rough_log2(x), std::log2(x) - kLine);
  }
}

TEST(HeadScale, RoughPowersUndoThem) {
  EXPECT_EQ(rough_exp2(0), 1);
  EXPECT_EQ(rough_exp2(-0.5f), 0.75f);
  EXPECT_EQ(rough_exp2(-30), 0x1p-30f);
  EXPECT_EQ(rough_exp2(-30.01f), 0);
  EXPECT_EQ(rough_exp2(-kInfinity), 0);
  EXPECT_EQ(rough_exp2(kNan), 0);
  for (float x = -29.9f; x <= 0; x += 0.013f) {
    EXPECT_NEAR(rough_log2(rough_exp2(x)), x, 1e-5f);
  }
}

TEST(HeadScale, StepsAddUpToTheirLogSumExp) {
  std::mt19937 random(1);
  EXPECT_EQ(sum_of_steps(nullptr, 0), -kInfinity);
  for (int spread : {0, 10, 100, 1000, 1 << 20}) {
    std::uniform_int_distribution<int32_t> step(-spread, spread);
    for (int64_t count : {1, 2, 3, 64, 129}) {
      std::vector<int32_t> steps(static_cast<size_t>(count));
      for (int32_t& s : steps) s = step(random);
      const int32_t most = *std::max_element(steps.begin(), steps.end());
      double sum = 0;
      for (const int32_t s : steps) sum += std::exp2((s - most) / 64.0);
      const double exact = most / 64.0 + std::log2(sum);
      EXPECT_NEAR(sum_of_steps(steps.data(), count), exact, kLine + 0.01) << spread << " " << count;
    }
  }
  const int32_t alike[] = {-640, -640, -640, -640};
  EXPECT_EQ(sum_of_steps(alike, 4), -8);
  const int32_t far[] = {0, -1024};
  EXPECT_EQ(sum_of_steps(far, 2), 0);
}

TEST(HeadScale, StepsAreBounded) {
  EXPECT_EQ(whole_steps(2.5f), 2);
  EXPECT_EQ(whole_steps(-3.5f), -4);
  EXPECT_EQ(whole_steps(kInfinity), 1 << 20);
  EXPECT_EQ(whole_steps(-1e30f), -(1 << 20));
}

/** Keys of one head: their signs and norms, and the statistics that are kept of them. */
struct Keys {
  static constexpr int64_t kDim = 64;
  std::vector<std::vector<int>> signs;
  std::vector<int64_t> units;
  int64_t usable = 0, square_units = 0, sums[kDim] = {};

  explicit Keys(int64_t count, uint32_t seed = 1) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < count; ++i) {
      signs.emplace_back(kDim);
      for (int& sign : signs.back()) sign = random() % 4 == 0 ? -1 : 1;
      units.push_back(norm_units(uint8_t(130 + random() % 20)));
      for (int64_t d = 0; d < kDim; ++d) sums[d] += signs.back()[size_t(d)] * units.back();
      square_units += units.back() * units.back();
    }
    usable = count;
  }
  KeyMeans means() {
    KeyStatistics statistics{};
    statistics.usable = &usable;
    statistics.square_units = &square_units;
    statistics.sums = sums;
    return KeyMeans(statistics, 0, kDim);
  }
};

std::vector<int8_t> some_query(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int8_t> query(size_t(Keys::kDim));
  for (int8_t& q : query) q = int8_t(int(random() % 31) - 15);
  return query;
}

TEST(HeadScale, MeanAndTotalAreThoseOfTheKeys) {
  Keys keys(500);
  const KeyMeans means = keys.means();
  const std::vector<int8_t> query = some_query(3);
  constexpr float kLargest = 6, kScale = 0.125f;
  const HeadScale scale = head_scale(means, query.data(), Keys::kDim, kLargest, kScale, -kInfinity);
  const double slope = double(kScale) * kLargest / 15 * 1.4426950408889634 / Keys::kDim;
  EXPECT_TRUE(scale.whole);
  EXPECT_NEAR(scale.slope, slope, 1e-6 * slope);

  double mean = 0, sum = 0;
  std::vector<double> octaves;
  for (size_t i = 0; i < keys.units.size(); ++i) {
    double dot = 0;
    for (size_t d = 0; d < query.size(); ++d) dot += query[d] * keys.signs[i][d];
    const double norm = double(keys.units[i]) * kNormUnit;
    octaves.push_back(scale.slope * dot * norm + scale.variance_term * norm * norm);
    mean += octaves.back() / double(keys.units.size());
    sum += std::exp2(octaves.back());
  }
  EXPECT_NEAR(scale.mean, mean, 1e-4 * std::fabs(mean));
  EXPECT_NEAR(scale.total, std::log2(sum), 1);
  // What the window adds: nothing, as much again, or all that counts.
  for (const float window : {scale.total - 40, scale.total, scale.total + 40}) {
    const HeadScale with = head_scale(means, query.data(), Keys::kDim, kLargest, kScale, window);
    EXPECT_NEAR(with.total, std::log2(std::exp2(scale.total) + std::exp2(window)), 1e-4);
  }
}

TEST(HeadScale, WithoutKeysTheScaleIsEmpty) {
  Keys none(0);
  const std::vector<int8_t> query = some_query(3);
  const HeadScale scale = head_scale(none.means(), query.data(), Keys::kDim, 1, 1, 5);
  float slope = 7, variance_term = 7, offset = 7;
  score_lines(&scale, 1, &slope, &variance_term, &offset, nullptr);
  EXPECT_EQ(slope, 0);
  EXPECT_EQ(variance_term, 0);
  EXPECT_EQ(offset, 64);
}

HeadScale scale_of(float mean, float spread, float total) {
  return {true, 0.5f, 0.25f, mean, spread, total};
}

TEST(HeadScale, TheHeadThatGivesMostToTheZoneLeads) {
  // Shares of the average key: 2^-10, 2^-8 (the lead, of a spread of 2), 2^-8, none.
  const HeadScale heads[] = {scale_of(5, 1, 15), scale_of(2, 2, 10), scale_of(3, 4, 11), {}};
  float slope[4], variance_term[4], offset[4];
  score_lines(heads, 4, slope, variance_term, offset, nullptr);
  const auto mean_score = [&](int h) { return offset[h] + heads[h].mean * 16 / 2; };
  EXPECT_EQ(mean_score(0), 64 - 2 * 16 / 2);
  EXPECT_EQ(mean_score(1), 64);
  EXPECT_EQ(mean_score(2), 64);
  for (int h = 0; h < 3; ++h) {
    EXPECT_EQ(slope[h], 0.5f * 16 / 2);
    EXPECT_EQ(variance_term[h], 0.25f * 16 / 2);
  }
  EXPECT_EQ(slope[3], 0);
  EXPECT_EQ(variance_term[3], 0);
  EXPECT_EQ(offset[3], 0);
}

TEST(HeadScale, FlatHeadsAreNotMagnified) {
  const HeadScale head = scale_of(-3, 1e-9f, 4);
  float slope, variance_term, offset;
  score_lines(&head, 1, &slope, &variance_term, &offset, nullptr);
  EXPECT_EQ(slope, 0.5f * 16 * 64);
  EXPECT_EQ(offset, 64 + 3 * 16 * 64);
}

TEST(HeadScale, QueriesThatAreNotFiniteNeverLead) {
  const HeadScale heads[] = {scale_of(kInfinity, 1, kInfinity), scale_of(kNan, 1, kNan),
                             scale_of(2, 2, 10), scale_of(2, kInfinity, kInfinity)};
  float slopes[4], variance_terms[4], offsets[4];
  score_lines(heads, 4, slopes, variance_terms, offsets, nullptr);
  for (int h = 0; h < 4; ++h) {
    EXPECT_EQ(slopes[h], h == 2 ? 4 : 0) << h;
    EXPECT_EQ(variance_terms[h], h == 2 ? 2 : 0) << h;
    EXPECT_EQ(offsets[h], h == 2 ? 64 - 16 : 64) << h;
  }
  HeadScale head = scale_of(1, 1, 1);
  head.variance_term = kInfinity;
  float slope, variance_term, offset;
  score_lines(&head, 1, &slope, &variance_term, &offset, nullptr);
  EXPECT_EQ(slope, 0);
  EXPECT_EQ(variance_term, 0);
  EXPECT_EQ(offset, 64);
}

}  // namespace
}  // namespace pariskv
