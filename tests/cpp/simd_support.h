/** What the tests of instruction sets share: rows of every kind, and where results go. */
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/numerics.h"
#include "cpu/rows.h"
#include "cpu/simd/kernels.h"
#include "pariskv/codec.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cpu {

template <int64_t... kSizes>
std::vector<int64_t> list_of(Sizes<kSizes...>) {
  return {kSizes...};
}

inline const std::vector<int64_t> kHeadDims = list_of(HeadDims{});
inline const std::vector<int64_t> kRotatedDims = list_of(RotatedDims{});
constexpr RowType kRowTypes[] = {RowType::kFloat32, RowType::kFloat16, RowType::kBFloat16,
                                 RowType::kInt8, RowType::kQ8_0};
constexpr int64_t kCounts[] = {0, 1, 63, 64, 65, 1000};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Level {
  const char* name;
  const Kernels* (*kernels)();
};

inline const Kernels* plain_level() { return &plain_kernels(); }

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

/** Halves of `dim` numbers, ending where their memory ends, 4 bytes off alignment. */
class Halves {
 public:
  Halves(const std::vector<float>& x, RowType type, int64_t dim)
      : bytes_(half_bytes(type, dim)), data_(int64_t(x.size()) / dim * bytes_ + kShift) {
    for (int64_t i = 0; i < int64_t(x.size()) / dim; ++i) {
      write_half(x.data() + i * dim, dim, type, data_.data() + kShift + i * bytes_);
    }
  }
  const char* at(int64_t i) const { return data_.data() + kShift + i * bytes_; }

 private:
  static constexpr int64_t kShift = 4;
  const int64_t bytes_;
  std::vector<char> data_;
};

/** The keys of rows of K and V, each of `dim` numbers. */
class Keys {
 public:
  Keys(const std::vector<float>& rows, RowType type, int64_t dim)
      : type(type), dim(dim), halves_(rows, type, dim) {
    for (int64_t r = 0; r < int64_t(rows.size()) / (2 * dim); ++r) at_.push_back(halves_.at(2 * r));
  }
  const void* const* data() const { return at_.data(); }
  int64_t count() const { return int64_t(at_.size()); }

  const RowType type;
  const int64_t dim;

 private:
  const Halves halves_;
  std::vector<const void*> at_;
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
inline Summaries encode(const Kernels& kernels, const Keys& keys, const float* gain = nullptr,
                        const float* shift = nullptr) {
  const int64_t rotated_dim = rotated_dim_of(keys.dim);
  const std::vector<float> rotation = rotation_signs(rotated_dim, 7);
  const MagnitudeLevels& levels = magnitude_levels();
  const std::vector<float> thresholds(levels.thresholds.begin(), levels.thresholds.end());
  const std::vector<float> centres(levels.centres.begin(), levels.centres.end());
  Summaries out(keys.count(), rotated_dim);
  kernels.encode({keys.data(), keys.type, keys.count(), keys.dim, rotated_dim, gain, shift,
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
