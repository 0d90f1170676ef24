// The arithmetic behind the common scale of a group's scores.
#include "policy/pariskv/codec/head_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace pariskv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMost = int(kMostSteps);
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
  for (int spread : {0, 10, 100, 1000, kMost}) {
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
  EXPECT_EQ(whole_steps(kInfinity), kMost);
  EXPECT_EQ(whole_steps(-1e30f), -kMost);
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
  const HeadScale scale =
      head_scale(means, nullptr, query.data(), Keys::kDim, kLargest, kScale, -kInfinity);
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
    const HeadScale with =
        head_scale(means, nullptr, query.data(), Keys::kDim, kLargest, kScale, window);
    EXPECT_NEAR(with.total, std::log2(std::exp2(scale.total) + std::exp2(window)), 1e-4);
  }
}

TEST(HeadScale, WithoutKeysTheScaleIsEmpty) {
  Keys none(0);
  const std::vector<int8_t> query = some_query(3);
  const HeadScale scale = head_scale(none.means(), nullptr, query.data(), Keys::kDim, 1, 1, 5);
  float slope = 7, variance_term = 7, offset = 7;
  score_lines(&scale, 1, &slope, &variance_term, &offset, nullptr);
  EXPECT_EQ(slope, 0);
  EXPECT_EQ(variance_term, 0);
  EXPECT_EQ(offset, 64);
}

HeadScale scale_of(float mean, float spread, float total) {
  return {true, 0.5f, 0.25f, mean, spread, total, 0, -kInfinity};
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

TEST(HeadScale, JoinedScoresAreThoseOfASumOfExponentials) {
  for (const int32_t octave : {4, 8, 16}) {
    for (int32_t a = 0; a < 200; ++a) {
      EXPECT_EQ(joined_score(a, a, octave), a + octave);
      for (int32_t b = 0; b < 200; ++b) {
        const double sum = std::log2(std::exp2(double(a) / octave) + std::exp2(double(b) / octave));
        const int32_t joined = joined_score(a, b, octave);
        EXPECT_NEAR(joined, octave * sum, 0.33 * octave + 1) << a << " " << b;
        EXPECT_EQ(joined, joined_score(b, a, octave));
        EXPECT_GE(joined, std::max(a, b));
        EXPECT_GE(joined_score(a + 1, b, octave), joined) << "a better score is not worth less";
      }
    }
  }
  EXPECT_EQ(joined_score(250, 250, 8), 255);
  for (int32_t a = 0; a < 256; ++a) EXPECT_EQ(joined_score(a, 0, 0), a) << "one head, by itself";
}

TEST(HeadScale, OctavesAreThoseOfTheLead) {
  float slope[9], variance_term[9], offset[9];
  const auto octave_of = [&](float spread, int64_t searchers) {
    std::vector<HeadScale> heads(size_t(searchers), scale_of(2, spread, 10));
    return score_lines(heads.data(), searchers, slope, variance_term, offset, nullptr);
  };
  EXPECT_EQ(octave_of(2, 4), 8);
  EXPECT_EQ(octave_of(3, 4), 5);
  EXPECT_EQ(octave_of(0.01f, 4), 32) << "of a flat head an octave may be more than all scores";
  EXPECT_EQ(octave_of(2, 1), 0) << "one head has none to be joined with";
  EXPECT_EQ(score_joins(1), 0);
  EXPECT_EQ(score_joins(4), 2);
  EXPECT_EQ(score_joins(5), 3);
  EXPECT_EQ(score_joins(8), 3);
  EXPECT_EQ(score_joins(9), 4);
}

// --- Blocks that share a mean ---

TEST(HeadScale, OfVarianceTheReachedPartCounts) {
  EXPECT_EQ(reached_variance(0, 1), 0);
  // Up to a spread of two logits all of it: half its square, in octaves.
  EXPECT_EQ(reached_variance(2.88f, 1), 2.88f);
  for (const float spread : {2.1f, 4.0f, 32.0f, 1000.0f}) {
    const float whole = spread * spread / 2 * kOctaves;
    const double part = 2.0 * spread - 2.0;  // what a reach of two spreads gives
    EXPECT_NEAR(reached_variance(whole, 1) / (part * kOctaves), 1, 1e-5) << spread;
    EXPECT_NEAR(reached_variance(whole / 9, 9) * 9 / (part * kOctaves), 1, 1e-5) << spread;
  }
  float before = 0;
  for (float whole = 0; whole < 100; whole += 0.25f) {  // longer keys are never worth less
    EXPECT_GE(reached_variance(whole, 1), before);
    before = reached_variance(whole, 1);
  }
  EXPECT_TRUE(std::isnan(reached_variance(kNan, 1)));
  EXPECT_FALSE(std::isfinite(reached_variance(kInfinity, 1)));
}

BlockSums sums_of(const std::vector<int32_t>& steps, int64_t first_block) {
  BlockSums all;
  const int64_t blocks = int64_t(steps.size());
  all.most = *std::max_element(steps.begin(), steps.end());
  for (int64_t done = 0, count; done < blocks; done += count) {
    count = std::min(kChunkBlocks - (first_block + done) % kChunkBlocks, blocks - done);
    all.add(BlockSums::of_chunk(steps.data() + done, count));
  }
  return all;
}

TEST(BlockSums, NumbersAreLoweredByHalvesOfWholeOctaves) {
  EXPECT_EQ(BlockSums::lowered(1 << 16, 0), 1 << 16);
  EXPECT_EQ(BlockSums::lowered(1 << 16, 64), 1 << 15);
  EXPECT_EQ(BlockSums::lowered(1 << 16, 32), 3 << 14);
  EXPECT_EQ(BlockSums::lowered(1 << 16, 64 * 16), 1);
  EXPECT_EQ(BlockSums::lowered(1 << 16, 64 * 17), 0);
  EXPECT_EQ(BlockSums::lowered(int64_t{1} << 40, 64 * 40), 1);
  EXPECT_EQ(BlockSums::lowered(int64_t{1} << 45, 64 * 41), 0);
  EXPECT_EQ(BlockSums::lowered(1 << 16, 1 << 21), 0);
}

TEST(BlockSums, AddUpToMeanVarianceAndLogSumExp) {
  std::mt19937 random(1);
  for (int spread : {0, 100, 1000, kMost}) {
    std::uniform_int_distribution<int32_t> step(-spread, spread);
    for (const int64_t blocks : {1, 63, 64, 65, 4096}) {
      for (const int64_t first : {0, 1, 63}) {
        std::vector<int32_t> steps(static_cast<size_t>(blocks));
        for (int32_t& s : steps) s = step(random);
        const BlockSums all = sums_of(steps, first);
        int64_t sum = 0, squares = 0;
        double weight = 0;
        for (const int32_t s : steps) {
          sum += s;
          squares += int64_t{s} * s;
          weight += std::exp2((s - all.most) / 64.0);
        }
        EXPECT_EQ(all.blocks, blocks);
        EXPECT_EQ(all.sum, sum);
        EXPECT_EQ(all.squares, squares);
        const float log = rough_log2(float(all.weight)) - 16.0f;
        // A line for a block, for its chunk's sum and for the logarithm; the first two are above.
        EXPECT_GE(log, std::log2(weight) - kLine - 0.01) << spread << " " << blocks;
        EXPECT_LE(log, std::log2(weight) + 2 * kLine + 0.01) << spread << " " << blocks;
      }
    }
  }
}

/** Keys of some blocks: what is left of them, and the statistics of that. */
struct Mixture {
  std::vector<int32_t> steps;  // of each block's mean
  int64_t usable = 0, square_units = 0;
  double sum = 0;               // of the attention, to the base 2
  double mean = 0, square = 0;  // of logits in octaves, as the scale sees them

  Mixture(int64_t blocks, int64_t per_block, double norm, double inner, double between) {
    std::mt19937 random(5);
    std::normal_distribution<double> normal;
    const int64_t units = int64_t(norm / kNormUnit);
    for (int64_t b = 0; b < blocks; ++b) {
      steps.push_back(int32_t(std::nearbyint(64 * between * normal(random))));
      for (int64_t i = 0; i < per_block; ++i) {
        const double logit = steps.back() / 64.0 + inner * normal(random);
        sum += std::exp2(logit);
        mean += logit, square += logit * logit;
      }
    }
    usable = blocks * per_block;
    square_units = usable * units * units;
    mean /= double(usable);
    square = square / double(usable) - mean * mean;
  }
  KeyMeans means() {
    KeyStatistics statistics{};
    statistics.usable = &usable;
    statistics.square_units = &square_units;
    return KeyMeans(statistics, 0, Keys::kDim);
  }
};

TEST(BlockSums, ScaleIsThatOfAMixtureOfBlocks) {
  const std::vector<int8_t> query = some_query(3);
  int64_t squares = 0;
  for (const int8_t q : query) squares += q * q;
  constexpr float kLargest = 6, kScale = 0.5f;
  const double slope = double(kScale) * kLargest / 15 * 1.4426950408889634 / Keys::kDim;
  for (const double norm : {2.0, 8.0}) {
    const double inner = slope * std::sqrt(double(squares)) * norm;  // of a key's logits, octaves
    for (const double between : {0.0, 0.5, 5.0}) {
      Mixture keys(200, 256, norm, inner, between);
      const KeyMeans means = keys.means();
      const BlockSums sums = sums_of(keys.steps, 3);
      const HeadScale scale =
          head_scale(means, &sums, query.data(), Keys::kDim, kLargest, kScale, -kInfinity);
      EXPECT_TRUE(scale.whole);
      EXPECT_NEAR(scale.slope, slope * kSignGain, 1e-6);
      const double variance = double(scale.variance_term) * norm * norm;
      EXPECT_NEAR(scale.mean, keys.mean + variance, 0.05) << norm << " " << between;
      EXPECT_NEAR(scale.spread, std::sqrt(keys.square), 0.02 * scale.spread);
      const float mass = scale.total + float(kHeadStart * inner);
      EXPECT_NEAR(mass, std::log2(keys.sum), 0.5) << norm << " " << between;
      const int32_t most = *std::max_element(keys.steps.begin(), keys.steps.end());
      EXPECT_NEAR(scale.top, most / 64.0 + kBlockReach * inner, 1e-3);
      const HeadScale with =
          head_scale(means, &sums, query.data(), Keys::kDim, kLargest, kScale, mass);
      EXPECT_NEAR(with.total, scale.total + 1, 1e-4);
    }
  }
}

TEST(BlockSums, WithoutKeysTheScaleIsEmpty) {
  Mixture keys(3, 1, 1, 0, 0);
  keys.usable = keys.square_units = 0;
  const BlockSums sums = sums_of(keys.steps, 0);
  const HeadScale scale =
      head_scale(keys.means(), &sums, some_query(3).data(), Keys::kDim, 1, 1, 5);
  float slope = 7, variance_term = 7, offset = 7, per_step = 7;
  score_lines(&scale, 1, &slope, &variance_term, &offset, &per_step);
  EXPECT_EQ(slope, 0);
  EXPECT_EQ(variance_term, 0);
  EXPECT_EQ(per_step, 0);
  EXPECT_EQ(offset, 64);
}

TEST(BlockSums, ScoresAreLoweredByWhatTheBestKeysPass255) {
  // Steps of 8 an octave: 255 lies 23.875 octaves above a mean key's 64, of which joining three
  // heads may take two.
  HeadScale heads[] = {scale_of(0, 2, 10), scale_of(-1, 2, 10), {}};
  float slope[3], variance_term[3], offset[3], per_step[3];
  const auto lines = [&] { return score_lines(heads, 3, slope, variance_term, offset, per_step); };
  heads[0].top = 21;
  EXPECT_EQ(lines(), 8);
  EXPECT_EQ(offset[0], 64);
  for (int h = 0; h < 2; ++h) EXPECT_EQ(per_step[h], 8 * 0x1p-6f);
  EXPECT_EQ(per_step[2], 0);
  const float second = offset[1];
  heads[0].top = 40;  // 18.125 octaves too high
  lines();
  EXPECT_EQ(offset[0], 64 - 8 * 18.125f);
  EXPECT_EQ(offset[0] + 40 * 8 + 2 * 8, 255) << "the best keys score what can be scored";
  EXPECT_EQ(offset[1], second - 8 * 18.125f) << "the scores of all heads are lowered";
  heads[0].top = 0, heads[1].top = 40;  // as shares of each head's own attention
  lines();
  EXPECT_EQ(offset[0], 64 - 8 * 18.125f);
  for (const float unknown : {kInfinity, kNan, -kInfinity}) {
    heads[0].top = unknown, heads[1].top = -kInfinity;
    lines();
    EXPECT_EQ(offset[0], 64) << unknown;
  }
}

}  // namespace
}  // namespace pariskv
