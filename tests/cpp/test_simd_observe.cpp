// Attention in whole numbers: every instruction set against plain.
#include <algorithm>
#include <string>
#include <vector>

#include "observe.h"
#include "simd_support.h"

namespace pariskv::cpu {
namespace {

class SimdObserve : public SimdTest {};

TEST_P(SimdObserve, StepLogits) {
  for (int64_t count : kCounts) {
    for (float unit : {0.0f, 1e-30f, 3e-3f, 7.0f, 3e38f}) {
      for (int32_t most : {5, 1 << 12, 1 << 29}) {
        const auto dots = integers<int32_t>(count, -(1 << 23), 1 << 23);
        auto steps = normals(count);
        if (count > 9) steps[0] = 0, steps[1] = 3e38f, steps[9] = 1e-38f;
        std::vector<int32_t> expected = integers<int32_t>(count, -(1 << 22), 1 << 22);
        if (count > 3) expected[3] = kNoLogit;
        std::vector<int32_t> actual = expected;
        StepLogitsRun run = {dots.data(), steps.data(), count, unit, -777, most, expected.data()};
        plain_.step_logits(run);
        run.logits = actual.data();
        kernels_->step_logits(run);
        ASSERT_EQ(expected, actual) << count << " " << unit << " " << most;
      }
    }
  }
}

TEST_P(SimdObserve, WeightsAndTheirSum) {
  for (int64_t count : kCounts) {
    for (int32_t reach : {0, 100, 2000, 1 << 24}) {
      auto expected = integers<int32_t>(count, -reach, 0);
      if (count > 1) expected[1] = kNoLogit;
      std::vector<int32_t> actual = expected;
      const uint64_t sum = plain_.weigh(expected.data(), count, 0, kWeights.data());
      EXPECT_EQ(kernels_->weigh(actual.data(), count, 0, kWeights.data()), sum);
      ASSERT_EQ(expected, actual) << count << " " << reach;
    }
  }
}

TEST_P(SimdObserve, Shares) {
  for (int64_t count : kCounts) {
    const auto weights = integers<int32_t>(count, 0, 1 << kWeightBits);
    for (const uint64_t sum : {uint64_t{0}, uint64_t{1} << kWeightBits, uint64_t{123456789012}}) {
      std::vector<uint64_t> expected(size_t(count), 11), actual = expected;
      plain_.add_shares(weights.data(), count, reciprocal_of(sum), expected.data());
      kernels_->add_shares(weights.data(), count, reciprocal_of(sum), actual.data());
      ASSERT_EQ(expected, actual) << count << " " << sum;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, SimdObserve,
                         testing::Values(Level{"avx2", avx2_kernels},
                                         Level{"avx512", avx512_kernels}),
                         [](const auto& level) { return std::string(level.param.name); });

}  // namespace
}  // namespace pariskv::cpu
