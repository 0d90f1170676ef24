// Blocks that share a mean: every instruction set against plain, bit for bit.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "policy/pariskv/codec/block_means.h"
#include "simd_support.h"

namespace pariskv::cpu {
namespace {

class SimdBlocks : public SimdTest {};

/** Factors and summands of channels, zero past the head's. */
struct Lean {
  std::vector<float> gain, shift;
};

TEST_P(SimdBlocks, EncodeWithGainAndShift) {
  for (int64_t head_dim : kHeadDims) {
    const int64_t rotated_dim = rotated_dim_of(head_dim);
    Lean lean{std::vector<float>(size_t(rotated_dim)), std::vector<float>(size_t(rotated_dim))};
    for (RowType type : kRowTypes) {
      for (int64_t count : kCounts) {
        std::vector<float> rows = normals(count * 2 * head_dim);
        make_awkward(rows, head_dim);
        const auto gain = normals(head_dim, 1), shift = normals(head_dim, 0.5f);
        for (int64_t d = 0; d < head_dim; ++d) {
          lean.gain[size_t(d)] = std::min(8.0f, std::fabs(gain[size_t(d)]) + 0.015f);
          lean.shift[size_t(d)] = d % 7 == 0 ? -0.0f : shift[size_t(d)];
        }
        if (count == 1000) lean.shift[1] = -127 * 0x1p121f;  // of the largest mean
        if (count >= 63) {  // a key of which nothing is left, and one that is all zero
          std::fill_n(lean.gain.begin(), head_dim, 0.5f);
          for (int64_t d = 0; d < head_dim; ++d) rows[size_t(30 * 2 * head_dim + d)] = 2;
          if (count == 64) std::fill_n(lean.shift.begin(), head_dim, -1.0f);
        }
        const Keys keys(rows, type, head_dim);
        const float *by = lean.gain.data(), *plus = lean.shift.data();
        const Summaries expected = encode(plain_, keys, by, plus);
        EXPECT_TRUE(expected == encode(*kernels_, keys, by, plus))
            << head_dim << " " << int(type) << " " << count;
        if (count != 64) continue;
        EXPECT_EQ(expected.norms[30], 1) << "a mean can be selected";
        for (const size_t bad : {5, 6, 7}) EXPECT_EQ(expected.norms[bad], 0) << bad;
      }
    }
  }
}

TEST_P(SimdBlocks, EncodeOfAGainOfOneIsThatOfWholeKeys) {
  constexpr int64_t kDim = 128, kCount = 100;
  std::vector<float> rows = normals(kCount * 2 * kDim);
  make_awkward(rows, kDim);
  const Keys keys(rows, RowType::kFloat32, kDim);
  const std::vector<float> one(kDim, 1.0f), none(kDim, 0.0f);
  const Summaries whole = encode(*kernels_, keys);
  Summaries same = encode(*kernels_, keys, one.data(), none.data());
  for (const size_t zero : {3, 4}) {  // whose signs are those of no key
    EXPECT_EQ(whole.norms[zero], 0);
    EXPECT_EQ(same.norms[zero], 1);
    same.norms[zero] = 0;
  }
  EXPECT_TRUE(whole == same);
}

/** Runs of whole blocks, of a part of one, and of blocks and a part. */
std::vector<int64_t> counts_of(int64_t block) {
  return {0, 1, 31, block - 1, block, block + 1, 3 * block, 3 * block + 33, 1000};
}

TEST_P(SimdBlocks, ScoreSigns) {
  for (int64_t dim : kRotatedDims) {
    const int64_t subspaces = dim / kSubspaceDim;
    for (int64_t heads : {1, 2, 3, 4, 8, 16, 17, 32}) {
      const int64_t block = std::array{64, 128, 256}[size_t(heads % 3)];
      for (int64_t count : counts_of(block)) {
        const int64_t stride = (count + block - 1) / block + 2;
        const auto signs = integers<uint8_t>(count * subspaces, 0, 255);
        auto norms = integers<uint8_t>(count, 0, 255);
        if (count > 1) norms[1] = 0;
        auto query = integers<int8_t>(heads * subspaces * 8, -15, 15);
        auto steps = integers<int32_t>(heads * stride, -(1 << 12), 1 << 12);
        auto slope = normals(heads, 1e-3f), variance_term = normals(heads, 1e-5f);
        auto offset = normals(heads, 100), per_step = normals(heads, 0.05f);
        if (heads == 2) {
          std::fill(query.begin(), query.end(), int8_t(-15));  // the widest sums
          steps = integers<int32_t>(heads * stride, 0, 1 << 20);
          steps[0] = -(1 << 20);
        }
        if (heads == 3) slope[1] = kNan, offset[0] = kInfinity, per_step[2] = 0;
        if (heads == 4) per_step[0] = kInfinity, per_step[1] = kNan, steps[0] = 0;
        std::vector<uint8_t> expected(count + 1, 7), actual(count + 1, 7);
        ScoreSignsRun run{};
        run.signs = signs.data(), run.norm_codes = norms.data(), run.count = count;
        run.subspaces = subspaces, run.heads = heads, run.query = query.data();
        run.slope = slope.data(), run.variance_term = variance_term.data();
        run.offset = offset.data(), run.per_step = per_step.data();
        run.block = block, run.steps = steps.data(), run.step_stride = stride;
        run.octave = int32_t(heads % 7) * 5;
        run.scores = expected.data();
        plain_.score_signs(run);
        run.scores = actual.data();
        kernels_->score_signs(run);
        EXPECT_EQ(expected, actual) << dim << " " << heads << " " << block << " " << count;
      }
    }
  }
}

TEST_P(SimdBlocks, OffsetsOfBlocksAreThoseOfRunsOfTheirOwn) {
  constexpr int64_t kDim = 64, kBlock = 64, kCount = 5 * kBlock + 7, kHeads = 3;
  const auto signs = integers<uint8_t>(kCount * kDim / 8, 0, 255);
  const auto norms = integers<uint8_t>(kCount, 100, 160);
  const auto query = integers<int8_t>(kHeads * kDim, -15, 15);
  const auto steps = integers<int32_t>(kHeads * 6, -640, 640);
  const auto slope = normals(kHeads, 1e-2f), variance_term = normals(kHeads, 1e-4f);
  const auto offset = normals(kHeads, 20), per_step = normals(kHeads, 0.1f);
  std::vector<uint8_t> at_once(kCount), one_by_one(kCount);
  ScoreSignsRun run{};
  run.signs = signs.data(), run.norm_codes = norms.data(), run.count = kCount;
  run.subspaces = kDim / 8, run.heads = kHeads, run.query = query.data();
  run.slope = slope.data(), run.variance_term = variance_term.data();
  run.offset = offset.data(), run.per_step = per_step.data();
  run.block = kBlock, run.steps = steps.data(), run.step_stride = 6;
  run.octave = 5, run.scores = at_once.data();
  kernels_->score_signs(run);
  run.block = 0;  // whole keys, from an offset of their own
  for (int64_t b = 0; b * kBlock < kCount; ++b) {
    std::vector<float> base(kHeads);
    for (size_t h = 0; h < kHeads; ++h) {
      base[h] = std::fma(float(steps[h * 6 + size_t(b)]), per_step[h], offset[h]);
    }
    run.offset = base.data();
    run.signs = signs.data() + b * kBlock * kDim / 8, run.norm_codes = norms.data() + b * kBlock;
    run.count = std::min(kBlock, kCount - b * kBlock);
    run.scores = one_by_one.data() + b * kBlock;
    kernels_->score_signs(run);
  }
  EXPECT_EQ(at_once, one_by_one);
  EXPECT_GT(*std::max_element(at_once.begin(), at_once.end()), 1);
}

TEST_P(SimdBlocks, MeanDots) {
  for (int64_t dim : kRotatedDims) {
    for (int64_t count : {0, 1, 3, 4, 16}) {
      for (int64_t heads : {1, 2, 3, 4, 7, 16}) {
        const int64_t stride = count + 5;
        auto means = integers<int8_t>(count * dim, -127, 127);
        auto query = integers<int16_t>(heads * dim, -16383, 16383);
        if (heads == 2) {  // the widest sums stay within 32 bits
          std::fill(means.begin(), means.end(), int8_t(-127));
          std::fill(query.begin(), query.end(), int16_t(16383));
        }
        std::vector<int32_t> expected(heads * stride, 7), actual = expected;
        MeanDotsRun run = {means.data(), count, dim, query.data(), heads, expected.data(), stride};
        plain_.mean_dots(run);
        run.dots = actual.data();
        kernels_->mean_dots(run);
        ASSERT_EQ(expected, actual) << dim << " " << heads << " " << count;
        for (int64_t b = 0; b < count; ++b) {
          int64_t dot = 0;
          for (int64_t c = 0; c < dim; ++c) {
            dot += int64_t{means[size_t(b * dim + c)]} * query[size_t((heads - 1) * dim + c)];
          }
          ASSERT_EQ(actual[size_t((heads - 1) * stride + b)], dot);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, SimdBlocks,
                         testing::Values(Level{"plain", plain_level}, Level{"avx2", avx2_kernels},
                                         Level{"avx512", avx512_kernels}),
                         [](const auto& level) { return std::string(level.param.name); });

}  // namespace
}  // namespace pariskv::cpu
