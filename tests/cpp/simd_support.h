/** What the tests of instruction sets share: rows of every kind, and where results go. */
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/summary_layout.h"
#include "cpu/numerics.h"
#include "cpu/simd/kernels.h"
#include "pariskv/codec.h"
#include "row_format.h"

namespace pariskv::cpu {

template <int64_t... kSizes>
std::vector<int64_t> list_of(Sizes<kSizes...>) {
  return {kSizes...};
}

inline const std::vector<int64_t> kHeadDims = list_of(HeadDims{});
inline const std::vector<int64_t> kRotatedDims = list_of(RotatedDims{});
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr int64_t kCounts[] = {0, 1, 63, 64, 65, 1000};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Level {
  const char* name;
  const Kernels* (*kernels)();
};

/** The same bits, or both NaN. */
inline bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

inline void expect_same(const std::vector<float>& expected, const std::vector<float>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(same(expected[i], actual[i])) << i << ": " << expected[i] << " " << actual[i];
  }
}

class SimdTest : public testing::TestWithParam<Level> {
 protected:
  void SetUp() override {
    kernels_ = GetParam().kernels();
    if (kernels_ == nullptr) GTEST_SKIP() << "not on this machine";
  }

  std::vector<float> normals(int64_t count, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> x(count);
    for (float& value : x) value = normal(random_);
    return x;
  }

  template <typename T>
  std::vector<T> integers(int64_t count, int low, int high) {
    std::uniform_int_distribution<int> uniform(low, high);
    std::vector<T> x(count);
    for (T& value : x) value = T(uniform(random_));
    return x;
  }

  const Kernels& plain_ = plain_kernels();
  const Kernels* kernels_ = nullptr;
  std::mt19937 random_{1};
};

/** Elements of `dtype`, ending where their memory ends, `shift` bytes off alignment. */
class Elements {
 public:
  Elements(const std::vector<float>& x, DType dtype) : bytes_(x.size() * size_of(dtype) + kShift) {
    for (size_t i = 0; i < x.size(); ++i) {
      char* out = bytes_.data() + kShift + i * size_of(dtype);
      const uint16_t half =
          dtype == DType::kFloat16 ? float_to_float16(x[i]) : float_to_bfloat16(x[i]);
      if (dtype == DType::kFloat32) {
        std::memcpy(out, &x[i], 4);
      } else {
        std::memcpy(out, &half, 2);
      }
    }
  }
  const char* data() const { return bytes_.data() + kShift; }

 private:
  static constexpr int64_t kShift = 4;
  std::vector<char> bytes_;
};

/** A run's output, poisoned, so that what should not be written shows. */
struct Summaries {
  Summaries(int64_t count, int64_t rotated_dim)
      : signs(count * rotated_dim / 8 + 1, 0xa5),
        norms(count + 1, 0xa5),
        records(count * rotated_dim / 2 + 1, 0xa5),
        scales(count + 1, 0xa5a5) {}
  bool operator==(const Summaries& other) const {
    return signs == other.signs && norms == other.norms && records == other.records &&
           scales == other.scales;
  }
  std::vector<uint8_t> signs, norms, records;
  std::vector<uint16_t> scales;
};

/** @param gain, shift  (rotated_dim) key * gain + shift is encoded; null: keys as they are */
inline Summaries encode(const Kernels& kernels, const Elements& rows, DType dtype, int64_t head_dim,
                        int64_t count, const float* gain = nullptr, const float* shift = nullptr) {
  const int64_t rotated_dim = rotated_dim_of(head_dim);
  const std::vector<float> rotation = rotation_signs(rotated_dim, 7);
  const MagnitudeLevels& levels = magnitude_levels();
  const std::vector<float> thresholds(levels.thresholds.begin(), levels.thresholds.end());
  const std::vector<float> centres(levels.centres.begin(), levels.centres.end());
  Summaries out(count, rotated_dim);
  kernels.encode({rows.data(), dtype, 2 * head_dim, count, head_dim, rotated_dim, gain, shift,
                  rotation.data(), thresholds.data(), centres.data(), out.signs.data(),
                  out.norms.data(), out.scales.data(), out.records.data()});
  return out;
}

/** Puts keys of every awkward kind over some of `rows`. */
inline void make_awkward(std::vector<float>& rows, int64_t head_dim) {
  const int64_t count = int64_t(rows.size()) / (2 * head_dim);
  const auto row = [&](int64_t i) { return rows.data() + i * 2 * head_dim; };
  const auto scale = [&](int64_t i, float by) {
    for (int64_t d = 0; d < head_dim; ++d) row(i)[d] *= by;
  };
  if (count < 63) return;
  scale(3, 0), scale(4, -0.0f);
  row(5)[7] = kNan, row(6)[0] = kInfinity, row(7)[head_dim - 1] = -kInfinity;
  scale(8, 1e30f), scale(9, 1e38f), scale(10, 1e-30f), scale(11, 1e-38f), scale(12, 1e-42f);
  scale(13, 1e4f), scale(14, 1e-5f), scale(15, 1e-7f);
  for (int64_t d = 0; d < head_dim; ++d) {
    row(16)[d] = d == 5 ? 3.0f : 0.0f;  // one element
    row(17)[d] = 1.0f;                  // levels at a border, zero subspaces
    row(18)[d] = d % 2 == 0 ? 1.0f : -1.0f;
    row(19)[d] = d == 0 ? 1e38f : 1e-38f;
    row(20)[d] = d < 8 ? 1.0f : 1e-30f;
    row(21)[d] = row(22)[d];
    row(23)[d] = std::numeric_limits<float>::denorm_min();
    row(24)[d] = std::numeric_limits<float>::max();
  }
}

}  // namespace pariskv::cpu
