// Floats to 8 bits and a scale: every instruction set against the formula, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "simd_support.h"
#include "tail_copies.h"

namespace pariskv::cpu {
namespace {

class SimdInt8 : public SimdTest {};

/** A half in 8 bits by the formula, between bytes that nothing may write. */
std::vector<char> int8_half(const std::vector<float>& x) {
  const int64_t count = int64_t(x.size());
  const float scale = int8_scale(x.data(), count);
  std::vector<char> half(size_t(count) + sizeof scale + 2, 99);
  for (int64_t i = 0; i < count; ++i) half[i + 1] = char(float_to_int8(x[i], scale));
  std::memcpy(half.data() + 1 + count, &scale, sizeof scale);
  return half;
}

/** The same by a kernel, of a half that ends where its memory ends. */
std::vector<char> int8_half(const Kernels& kernels, const void* half, RowType type, int64_t count) {
  std::vector<char> out(size_t(count) + sizeof(float) + 2, 99);
  kernels.to_int8(half, type, count, out.data() + 1);
  return out;
}

std::vector<char> int8_half(const Kernels& kernels, const std::vector<float>& x) {
  return int8_half(kernels, x.data(), RowType::kFloat32, int64_t(x.size()));
}

constexpr int64_t kInt8Counts[] = {1, 7, 15, 16, 17, 31, 63, 64, 80, 128, 255, 256};

TEST_P(SimdInt8, NumbersOfAllSizes) {
  for (const int64_t count : kInt8Counts) {
    for (int exponent = -152; exponent <= 128; ++exponent) {
      std::vector<float> x = normals(count);
      for (float& value : x) value = std::ldexp(value, exponent);  // beyond 2^126 some are infinite
      const std::vector<char> expected = int8_half(x);
      ASSERT_TRUE(expected == int8_half(*kernels_, x)) << count << " " << exponent;
    }
  }
}

TEST_P(SimdInt8, SpecialNumbersInEveryPlace) {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  const float specials[] = {kNan,  -kNan,  kInfinity,    -kInfinity,   0,           -0.0f,
                            kMost, -kMost, kLeast,       -kLeast,      63 * kLeast, 1e-38f,
                            127,   -127,   190 * kLeast, 191 * kLeast, 3 * kLeast};
  for (const int64_t count : kInt8Counts) {
    for (const float other : {0.0f, -0.0f, 1.0f, kLeast, kMost}) {
      for (const float special : specials) {
        for (int64_t place = 0; place < count; ++place) {
          std::vector<float> x(count, other);
          x[place] = special;
          const std::vector<char> expected = int8_half(x);
          ASSERT_TRUE(expected == int8_half(*kernels_, x))
              << special << " " << other << " " << place;
        }
      }
    }
  }
}

TEST_P(SimdInt8, HalvesGoToEven) {
  std::vector<float> x = {127};  // the scale is 1
  for (int level = -127; level < 127; ++level) x.push_back(float(level) + .5f);
  const std::vector<char> half = int8_half(*kernels_, x);
  for (size_t i = 1; i < x.size(); ++i) EXPECT_EQ(half[i + 1], std::nearbyint(x[i])) << x[i];
  EXPECT_TRUE(half == int8_half(x));
}

TEST_P(SimdInt8, AnyBitPatterns) {
  for (int run = 0; run < 20000; ++run) {
    std::vector<float> x(kInt8Counts[size_t(run) % std::size(kInt8Counts)]);
    // Of two exponents; or of any, and then few are so large that most others are 0.
    const uint32_t exponents = run % 3 == 0 ? 0x7f800000u : 0x00800000u;
    const uint32_t base = uint32_t(random_()) & ~exponents & 0x7f800000u;
    for (float& value : x) {
      value = float_of(base | (uint32_t(random_()) & (exponents | 0x807fffffu)));
    }
    ASSERT_TRUE(int8_half(x) == int8_half(*kernels_, x)) << run;
  }
}

TEST_P(SimdInt8, RowsOfEveryType) {
  for (const RowType type : kRowTypes) {
    for (const int64_t count : kInt8Counts) {
      for (int run = 0; run < 200; ++run) {
        std::vector<float> x = normals(count, run % 2 == 0 ? 1 : 1e-6f);
        if (run % 10 == 9) x[size_t(run) % x.size()] = run % 20 == 9 ? kNan : -kInfinity;
        const Halves halves(x, type, count);
        plain_.to_float(halves.at(0), type, count, x.data());
        ASSERT_TRUE(int8_half(x) == int8_half(*kernels_, halves.at(0), type, count))
            << int(type) << " " << count;
      }
    }
  }
}

TEST_P(SimdInt8, NumbersAreMultipliedAndMoved) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const float specials[] = {kNan, kInfinity, -kInfinity, kMost, -kMost, 0, 1e-45f};
  for (const int64_t count : kInt8Counts) {
    for (int run = 0; run < 200; ++run) {
      std::vector<float> x = normals(count), factor = normals(count), added = normals(count);
      if (run % 4 == 1) x[size_t(run) % x.size()] = specials[size_t(run / 4) % 7];
      if (run % 4 == 2) added[size_t(run) % x.size()] = kMost;
      if (run % 4 == 3) factor[size_t(run) % x.size()] = -kMost;
      std::vector<float> out(size_t(count) + 1, 99);
      const uint32_t largest =
          kernels_->affine(x.data(), factor.data(), added.data(), count, out.data());
      uint32_t expected = 0;
      bool whole = true;
      for (int64_t i = 0; i < count; ++i) {
        const float y = affine(x[i], factor[i], added[i]);
        whole = whole && y - y == 0;
        expected = std::max(expected, bits_of(std::fabs(y)));
        ASSERT_TRUE(bits_of(out[i]) == bits_of(y) || (out[i] != out[i] && y != y))
            << count << " " << run;
        ASSERT_EQ(std::isfinite(y), std::isfinite(x[i])) << x[i];
      }
      EXPECT_EQ(largest < bits_of(kInfinity), whole);
      if (whole) {
        EXPECT_EQ(largest, expected);
      }
      EXPECT_EQ(out.back(), 99);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, SimdInt8,
                         testing::Values(Level{"plain", plain_level}, Level{"avx2", avx2_kernels},
                                         Level{"avx512", avx512_kernels}),
                         [](const auto& level) { return std::string(level.param.name); });

}  // namespace
}  // namespace pariskv::cpu
