#include <gtest/gtest.h>

#include <cmath>

#include "cpu/numerics.h"
#include "pariskv/codec.h"
#include "policy/pariskv/codec/schedule.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv {
namespace {

constexpr uint64_t kGoldenSigns42 = 0x67831947fcd872a1u;

TEST(Codec, LevelsAreTheLloydMaxQuantiser) {
  // Both conditions of the optimum, by sums over a fine grid instead of closed forms: borders
  // halfway between centres, centres at the means of their cells. They are kept to 11 bits, which
  // GPUs multiply exactly.
  const MagnitudeLevels& levels = magnitude_levels();
  const auto density = [](double t) { return std::pow(1 - t * t, 2.5); };
  for (int l = 0; l < 8; ++l) {
    const double low = l == 0 ? 0 : levels.thresholds[l - 1];
    const double high = l == 7 ? 1 : levels.thresholds[l];
    double mass = 0, moment = 0;
    for (int i = 0; i < 100'000; ++i) {
      const double t = low + (high - low) * (i + .5) / 100'000;
      mass += density(t);
      moment += t * density(t);
    }
    int exponent = 0;
    const double in_steps = std::ldexp(std::frexp(levels.centres[l], &exponent), 11);
    EXPECT_EQ(in_steps, std::nearbyint(in_steps));
    const double half_step = std::ldexp(1, exponent - 12);
    EXPECT_NEAR(levels.centres[l], moment / mass, half_step + 1e-9);
    if (l < 7) {
      EXPECT_NEAR(high, (levels.centres[l] + levels.centres[l + 1]) / 2, 2.5e-4);
    }
  }
  // Near the figures of the published code, which stopped a little short of the optimum.
  const double published[] = {.0420, .1266, .2130, .3025, .3973, .5001, .6169, .7633};
  for (int l = 0; l < 8; ++l) EXPECT_NEAR(levels.centres[l], published[l], 4e-3);
}

TEST(Codec, RotationSignsNeverChange) {
  // Saved caches and other backends depend on these; they must not move.
  const std::vector<float> signs = rotation_signs(64, 42);
  uint64_t word = 0;
  for (int i = 0; i < 64; ++i) word |= uint64_t(signs[size_t(i)] < 0) << i;
  EXPECT_EQ(word, kGoldenSigns42);
  const std::vector<float> longer = rotation_signs(256, 42);
  EXPECT_TRUE(std::equal(signs.begin(), signs.end(), longer.begin()));
  EXPECT_NE(rotation_signs(64, 43), signs);
}

TEST(Codec, SummaryTakes83BytesPerKeyAt128) {
  EXPECT_EQ((SummaryLayout{8, 1024, 128, 0}.key_bytes()), 83);
  EXPECT_EQ((SummaryLayout{8, 1024, 64, 0}.key_bytes()), 43);
  EXPECT_EQ((SummaryLayout{8, 1024, 256, 0}.key_bytes()), 163);
}

TEST(Codec, MeansOfBlocksTakeAByteOrLessPerKey) {
  const auto per_key = [](const SummaryLayout& layout) {
    return double(layout.bytes()) / double(layout.kv_heads * layout.tokens);
  };
  EXPECT_EQ(per_key({8, 1024, 128, 0}), 83);
  EXPECT_EQ(per_key({8, 1024, 128, 256}), 83 + 132.0 / 256);
  EXPECT_EQ(per_key({8, 1024, 128, 128}), 83 + 132.0 / 128);
  EXPECT_EQ(per_key({8, 1024, 128, 64}), 83 + 132.0 / 64);
  EXPECT_EQ(per_key({2, 256, 64, 256}), 43 + 68.0 / 256);
  EXPECT_EQ(per_key({2, 256, 64, 64}), 43 + 68.0 / 64);
  EXPECT_EQ(per_key({1, 1024, 512, 64}), 323 + 516.0 / 64);
}

TEST(Codec, PlanesOfASegmentLieOneAfterAnother) {
  for (const int64_t block : {64, 128, 256}) {
    const SummaryLayout layout{3, 512, 64, block};
    EXPECT_EQ(layout.blocks(), 512 / block);
    EXPECT_EQ(layout.signs_at(2, 511) + layout.subspaces(), layout.norms_at(0, 0));
    EXPECT_EQ(layout.norms_at(2, 511) + 1, layout.scales_at(0, 0));
    EXPECT_EQ(layout.scales_at(2, 511) + 2, layout.records_at(0, 0));
    EXPECT_EQ(layout.records_at(2, 511) + layout.record_bytes(), layout.means_at(0, 0));
    EXPECT_EQ(layout.means_at(2, layout.blocks() - 1) + 64, layout.steps_at(0, 0));
    EXPECT_EQ(layout.steps_at(2, layout.blocks() - 1) + 4, layout.bytes());
    EXPECT_EQ(layout.means_at(0, 0) % 64, 0);
    EXPECT_EQ(layout.steps_at(0, 0) % 64, 0);
    EXPECT_EQ(layout.means_at(1, 0), layout.means_at(0, layout.blocks()));
  }
}

TEST(Codec, NormCodesRoundToFiveBits) {
  for (float norm = 0x1.08p-5f; norm < 0x1.ep10f; norm *= 1.003f) {
    const uint8_t code = norm_code(cpu::bits_of(norm));
    const double decoded = double(norm_units(code)) * kNormUnit;
    EXPECT_NEAR(decoded / norm, 1, 1.0 / 32) << norm;
    EXPECT_EQ(decoded, cpu::float_of(uint32_t(code + kNormBase) << kNormShift));
  }
  EXPECT_EQ(norm_code(cpu::bits_of(1e-30f)), 1);
  EXPECT_EQ(norm_code(cpu::bits_of(1e30f)), 255);
  EXPECT_EQ(norm_units(0), 0);
}

TEST(Codec, ScaleRoundsUpByLessThanHalfAPercent) {
  for (float scale = 1e-38f; scale < 1e38f; scale *= 1.37f) {
    const float decoded = cpu::float_of(uint32_t{scale_code(cpu::bits_of(scale))} << kScaleShift);
    EXPECT_GE(decoded, scale);
    EXPECT_LE(decoded, scale * (1 + 0x1p-8f));
  }
}

TEST(Codec, HalfFloatsRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half = uint16_t(bits);
    const float as_float16 = cpu::float16_to_float(half);
    const float as_bfloat16 = cpu::bfloat16_to_float(half);
    if (!std::isnan(as_float16)) {
      EXPECT_EQ(cpu::float_to_float16(as_float16), half);
    }
    if (!std::isnan(as_bfloat16)) {
      EXPECT_EQ(cpu::float_to_bfloat16(as_bfloat16), half);
    }
  }
  // Ties go to even, and what is too large to infinity.
  EXPECT_EQ(cpu::float_to_float16(1 + 0x1p-11f), 0x3c00);
  EXPECT_EQ(cpu::float_to_float16(1 + 0x3p-11f), 0x3c02);
  EXPECT_EQ(cpu::float_to_float16(65519.0f), 0x7bff);
  EXPECT_EQ(cpu::float_to_float16(65520.0f), 0x7c00);
  EXPECT_EQ(cpu::float_to_float16(0x1p-25f), 0);
  EXPECT_EQ(cpu::float_to_bfloat16(1 + 0x1p-8f), 0x3f80);
  EXPECT_TRUE(std::isnan(cpu::bfloat16_to_float(cpu::float_to_bfloat16(NAN))));
  EXPECT_TRUE(std::isnan(cpu::float16_to_float(cpu::float_to_float16(NAN))));
}

TEST(Codec, ExpIsWithinTwoUnits) {
  for (float x = -87; x < 88; x += 0.0137f) {
    const double exact = std::exp(double(x));
    EXPECT_NEAR(cpu::exp(x) / exact, 1, 2.5e-7) << x;
  }
  EXPECT_EQ(cpu::exp(0), 1);
  EXPECT_LT(cpu::exp(-INFINITY), 2e-38f);
  EXPECT_TRUE(std::isnan(cpu::exp(NAN)));
}

TEST(Codec, ScheduleIsAStepFunctionOfTheZone) {
  ParisKV whole;
  whole.block = 0;
  ParisKV settings = ParisKV().resolved();
  whole = whole.resolved();
  EXPECT_EQ(candidate_count(settings, 300), 300);
  EXPECT_EQ(candidate_count(settings, 4'999), 2'500);
  EXPECT_EQ(candidate_count(settings, 5'000), 400);
  EXPECT_EQ(candidate_count(settings, 20'000), 1'000);
  EXPECT_EQ(candidate_count(whole, 300), 300);
  EXPECT_EQ(candidate_count(whole, 4'999), 2'500);
  EXPECT_EQ(candidate_count(whole, 5'000), 1'250);
  EXPECT_EQ(candidate_count(whole, 29'999), 6'000);
  for (const ParisKV& either : {settings, whole}) {
    EXPECT_EQ(candidate_count(either, 30'000), 1'500);
    EXPECT_EQ(candidate_count(either, 99'999), 5'000);
    EXPECT_EQ(candidate_count(either, 1'000'000), 12'500);
  }
  EXPECT_EQ(candidate_count(settings, 100'000), 2'000);
  EXPECT_EQ(candidate_count(settings, 250'000), 5'000);
  EXPECT_EQ(candidate_count(whole, 100'000), 4'000);
  EXPECT_EQ(candidate_count(whole, 250'000), 6'250);
  settings.schedule = {{0, .001, .5}};
  EXPECT_EQ(candidate_count(settings, 30'000), 400) << "never under a few per row";
}

}  // namespace
}  // namespace pariskv
