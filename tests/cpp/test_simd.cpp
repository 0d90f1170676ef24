// Every instruction set against plain, bit for bit; test_simd_blocks.cpp has blocks with means.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "simd_support.h"

namespace pariskv::cpu {
namespace {

class Simd : public SimdTest {};

TEST_P(Simd, NamesItselfAndIsComplete) {
  EXPECT_STREQ(kernels_->name, GetParam().name);
  EXPECT_TRUE(kernels_->encode && kernels_->score_signs && kernels_->score_votes &&
              kernels_->mean_dots && kernels_->collect && kernels_->round_dots &&
              kernels_->step_logits && kernels_->weigh && kernels_->add_shares &&
              kernels_->estimate && kernels_->score_pages && kernels_->attend &&
              kernels_->sum_exp && kernels_->add_exp && kernels_->to_float && kernels_->to_int8);
}

TEST_P(Simd, Encode) {
  for (int64_t head_dim : kHeadDims) {
    for (RowType type : kRowTypes) {
      for (int64_t count : kCounts) {
        std::vector<float> rows = normals(count * 2 * head_dim);
        make_awkward(rows, head_dim);
        const Keys keys(rows, type, head_dim);
        EXPECT_TRUE(encode(plain_, keys) == encode(*kernels_, keys))
            << head_dim << " " << int(type) << " " << count;
      }
    }
  }
}

TEST_P(Simd, Tally) {
  for (const int64_t dim : kRotatedDims) {
    const int64_t subspaces = dim / kSubspaceDim;
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{63}, kTallyKeys}) {
      const auto signs = integers<uint8_t>(count * subspaces, 0, 255);
      const auto units = integers<int32_t>(count, 0, 1 << 20);
      std::vector<int32_t> expected(size_t(subspaces * 8), 5), actual = expected;
      plain_.tally(signs.data(), units.data(), count, subspaces, expected.data());
      kernels_->tally(signs.data(), units.data(), count, subspaces, actual.data());
      ASSERT_EQ(expected, actual) << subspaces << " " << count;
    }
  }
}

TEST_P(Simd, ScoreSigns) {
  for (int64_t dim : kRotatedDims) {
    const int64_t subspaces = dim / kSubspaceDim;
    for (int64_t heads : {1, 2, 3, 4, 8, 16, 17, 32}) {
      for (int64_t count : kCounts) {
        const auto signs = integers<uint8_t>(count * subspaces, 0, 255);
        auto norms = integers<uint8_t>(count, 0, 255);
        if (count > 1) norms[1] = 0;
        auto query = integers<int8_t>(heads * subspaces * 8, -15, 15);
        auto slope = normals(heads, 1e-3f), variance_term = normals(heads, 1e-5f);
        auto offset = normals(heads, 100);
        if (heads == 2) {
          std::fill(query.begin(), query.end(), int8_t(-15));  // the widest sums
          slope[0] = 1e30f;
        }
        if (heads == 3) slope[1] = kNan, offset[0] = kInfinity;
        if (heads == 4) variance_term[0] = 1e38f, variance_term[1] = kNan;
        std::vector<uint8_t> expected(count + 1, 7), actual(count + 1, 7);
        ScoreSignsRun run{};
        run.signs = signs.data(), run.norm_codes = norms.data(), run.count = count;
        run.subspaces = subspaces, run.heads = heads, run.query = query.data();
        run.slope = slope.data(), run.variance_term = variance_term.data();
        run.offset = offset.data(), run.octave = int32_t(heads % 7) * 5;
        run.scores = expected.data();
        plain_.score_signs(run);
        run.scores = actual.data();
        kernels_->score_signs(run);
        EXPECT_EQ(expected, actual) << subspaces << " " << heads << " " << count;
      }
    }
  }
}

TEST_P(Simd, ScoreVotes) {
  for (int64_t dim : list_of(VoteDims{})) {
    const int64_t subspaces = dim / kSubspaceDim;
    for (int64_t heads : {1, 2, 3, 4, 8, 16, 32}) {
      for (int64_t count : kCounts) {
        const auto signs = integers<uint8_t>(count * subspaces, 0, 255);
        const auto norms = integers<uint8_t>(count, 0, 3);
        const auto votes = integers<uint8_t>(heads * subspaces * 256, heads == 2 ? 6 : 0, 6);
        std::vector<uint8_t> expected(count + 1, 7), actual(count + 1, 7);
        ScoreVotesRun run = {signs.data(), norms.data(), count,          subspaces,
                             heads,        votes.data(), expected.data()};
        plain_.score_votes(run);
        run.scores = actual.data();
        kernels_->score_votes(run);
        EXPECT_EQ(expected, actual) << subspaces << " " << heads << " " << count;
      }
    }
  }
}

TEST_P(Simd, Collect) {
  for (int64_t count : {0, 1, 31, 32, 33, 63, 64, 65, 1000}) {
    for (int spread : {0, 3, 255}) {
      const auto scores = integers<uint8_t>(count, 0, spread);
      for (int threshold : {0, 1, 2, 128, 254, 255}) {
        for (int64_t ties : {0, 1, 5, 40, 100000}) {
          std::vector<int32_t> expected(count + 64), actual(count + 64);
          int64_t left = ties, left_too = ties;
          const int64_t found = plain_.collect(scores.data(), count, uint8_t(threshold), &left,
                                               1234567, expected.data());
          ASSERT_EQ(found, kernels_->collect(scores.data(), count, uint8_t(threshold), &left_too,
                                             1234567, actual.data()));
          EXPECT_EQ(left, left_too);
          expected.resize(found), actual.resize(found);
          EXPECT_EQ(expected, actual) << count << " " << spread << " " << threshold;
        }
      }
    }
  }
}

TEST_P(Simd, RoundDots) {
  for (int64_t head_dim : kHeadDims) {
    for (RowType type : kRowTypes) {
      for (int64_t count : {0, 1, 33, 63, 64, 130}) {
        std::vector<float> rows = normals(count * 2 * head_dim);
        make_awkward(rows, head_dim);
        const Keys keys(rows, type, head_dim);
        for (int64_t queries : {1, 2, 7, 16, 65}) {
          const auto query = integers<int16_t>(queries * head_dim, -127, 127);
          std::vector<int32_t> expected(queries * count + 1, 7), actual = expected;
          std::vector<uint8_t> exponents(count + 1, 7), exponents_too = exponents;
          RoundDotsRun run = {keys.data(),     count,           type,
                              head_dim,        queries,         query.data(),
                              expected.data(), exponents.data()};
          plain_.round_dots(run);
          run.dots = actual.data();
          run.exponents = exponents_too.data();
          kernels_->round_dots(run);
          ASSERT_EQ(expected, actual) << head_dim << " " << int(type) << " " << queries;
          ASSERT_EQ(exponents, exponents_too) << head_dim << " " << int(type);
        }
      }
    }
  }
}

TEST_P(Simd, Estimate) {
  constexpr int64_t kKeys = 1000;
  for (int64_t dim : kRotatedDims) {
    const Summaries keys = encode(plain_, Keys(normals(kKeys * 2 * dim), RowType::kFloat32, dim));
    const auto centres = normals(16);
    for (int64_t heads : {1, 2, 3, 4, 8, 16, 32}) {
      const auto query = normals(heads * dim);
      for (int64_t count : kCounts) {
        const auto slots = integers<int32_t>(count, 0, kKeys - 1);
        const int64_t stride = count + 3;
        std::vector<float> expected(heads * stride, 7), actual(heads * stride, 7);
        // The layout's own bytes, without the poison at their ends.
        EstimateRun run = {keys.signs.data(),
                           keys.scales.data(),
                           keys.records.data(),
                           dim,
                           slots.data(),
                           count,
                           heads,
                           query.data(),
                           centres.data(),
                           expected.data(),
                           stride};
        plain_.estimate(run);
        run.estimates = actual.data();
        kernels_->estimate(run);
        expect_same(expected, actual);
      }
    }
  }
}

TEST_P(Simd, ScorePages) {
  for (int64_t dim : kHeadDims) {
    for (int64_t queries : {0, 1, 2, 3, 4, 5, 8, 16, 33}) {
      auto query = normals(queries * dim);
      for (int64_t count : kCounts) {
        // Finite numbers of 16 bits, the smallest among them, and units of any size.
        auto digests = integers<uint16_t>(count * 2 * dim, 0, 0x7bff);
        for (size_t i = 0; i < digests.size(); i += 3) digests[i] |= 0x8000;
        std::vector<float> units(size_t(count), 0x1p-14f);
        if (count > 2) units[0] = 0, units[1] = 0x1p113f, units[2] = 0x1p-114f;
        if (count > 2 && queries > 1) query[1] = 3e38f;
        std::vector<float> expected(size_t(count), 7), actual = expected;
        ScorePagesRun run = {digests.data(), units.data(), count,          dim,
                             queries,        query.data(), expected.data()};
        plain_.score_pages(run);
        run.scores = actual.data();
        kernels_->score_pages(run);
        expect_same(expected, actual);
        for (const float score : actual) EXPECT_TRUE(std::isfinite(score));
      }
    }
  }
}

struct Attention {
  std::vector<float> maximum, sum, weighted, squares;
};

TEST_P(Simd, Attend) {
  int shape = 0;
  std::vector<RowFormat> formats;  // K and V of one type, or the types of another order
  const size_t types = std::size(kRowTypes);
  const auto add = [&](int64_t key_dim, int64_t value_dim, size_t apart) {
    for (size_t t = 0; t < types; ++t) {
      formats.push_back({key_dim, value_dim, kRowTypes[t], kRowTypes[(t + apart) % types]});
    }
  };
  for (const auto& [key_dim, value_dim] : {std::pair{192, 128}, {64, 512}, {512, 64}, {80, 96}}) {
    add(key_dim, value_dim, 0);
    add(key_dim, value_dim, 1);
  }
  for (const int64_t dim : kHeadDims) add(dim, dim, 0);
  for (const RowFormat& format : formats) {
    const int64_t row = format.elements();
    // The most are three tiles and a part: with more of them nothing else happens.
    constexpr int64_t kMostRows = 3 * kAttendTile + 8;
    for (int64_t count :
         {int64_t{0}, int64_t{1}, kAttendTile - 1, kAttendTile, kAttendTile + 1, kMostRows}) {
      for (int64_t queries : {1, 2, 3, 4, 5, 8, 16, 32, 70}) {
        if (count == kMostRows && queries > 5 && (queries != 32 || row > 512)) continue;
        // Limits: all rows, ragged with 0 and beyond the end, or one apart as in a prompt.
        const int kind = shape++ % 3;
        std::vector<int64_t> limits(queries, count);
        for (int64_t q = 0; q < queries; ++q) {
          if (kind == 1) limits[q] = q % 4 == 1 ? 0 : q % 4 == 2 ? count + 9 : count / (q + 1);
          if (kind == 2) limits[q] = std::max<int64_t>(0, count - queries + q);
        }
        const int64_t deepest = std::min(count, *std::max_element(limits.begin(), limits.end()));

        std::vector<float> k = normals(count * format.key_dim);
        std::vector<float> v = normals(count * format.value_dim);
        if (shape % 7 == 0 && deepest > 40) {
          k[40 * format.key_dim + 3] = kNan;
          v[20 * format.value_dim + 5] = -kInfinity;
        }
        const Halves stored_keys(k, format.key, format.key_dim);
        const Halves stored_values(v, format.value, format.value_dim);
        std::vector<const void*> keys(count), values(count);
        for (int64_t r = 0; r < deepest; ++r) {  // rows that nobody sees are not even there
          keys[r] = stored_keys.at(r);
          values[r] = stored_values.at(r);
        }
        std::shuffle(keys.begin(), keys.begin() + deepest, random_);
        std::shuffle(values.begin(), values.begin() + deepest, random_);

        const auto query = normals(queries * format.key_dim);
        std::vector<float> scratch(kAttendTile * std::max(format.key_dim, format.value_dim));
        const auto attend = [&](const Kernels& kernels) {
          Attention state = {std::vector<float>(queries, -kInfinity),
                             std::vector<float>(queries, 0.0f),
                             std::vector<float>(queries * format.value_dim, 0.0f),
                             std::vector<float>(queries, 0.0f)};
          for (int half = 0; half < 2; ++half) {  // continued from a running state
            kernels.attend({keys.data(), values.data(), count, format.key, format.value,
                            format.key_dim, format.value_dim, queries, query.data(), limits.data(),
                            0.09f, shape % 2 == 0 ? 2.5f : 0.0f,
                            shape % 3 == 1 ? nullptr : query.data(), state.maximum.data(),
                            state.sum.data(), state.weighted.data(), scratch.data(),
                            shape % 3 == 0 ? nullptr : state.squares.data()});
          }
          return state;
        };
        const Attention expected = attend(plain_), actual = attend(*kernels_);
        SCOPED_TRACE(testing::Message() << format.key_dim << "/" << format.value_dim << " "
                                        << int(format.key) << "/" << int(format.value) << " "
                                        << count << " rows, " << queries << " queries " << kind);
        expect_same(expected.maximum, actual.maximum);
        expect_same(expected.sum, actual.sum);
        expect_same(expected.weighted, actual.weighted);
        expect_same(expected.squares, actual.squares);
      }
    }
  }
}

TEST_P(Simd, AttendSquaresTheWeights) {
  constexpr int64_t kDim = 64, kRows = 150, kQueries = 70;
  const auto rows = normals(kRows * kDim), query = normals(kQueries * kDim);
  std::vector<const void*> halves(kRows);
  for (int64_t r = 0; r < kRows; ++r) halves[r] = rows.data() + r * kDim;
  const std::vector<int64_t> limits(kQueries, kRows);
  std::vector<float> maximum(kQueries, -kInfinity), sum(kQueries), weighted(kQueries * kDim),
      squares(kQueries), scratch(kAttendTile * kDim);
  kernels_->attend({halves.data(), halves.data(), kRows, RowType::kFloat32, RowType::kFloat32, kDim,
                    kDim, kQueries, query.data(), limits.data(), .5f, 0, nullptr, maximum.data(),
                    sum.data(), weighted.data(), scratch.data(), squares.data()});
  for (int64_t q = 0; q < kQueries; ++q) {
    double expected = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      double logit = 0;
      for (int64_t d = 0; d < kDim; ++d) logit += .5 * query[q * kDim + d] * rows[r * kDim + d];
      expected += std::exp(2 * (logit - maximum[q]));
    }
    EXPECT_NEAR(squares[q], expected, 1e-4 * expected) << q;
  }
}

TEST_P(Simd, AttendRespectsTheLimitOfEachQuery) {
  constexpr int64_t kDim = 64, kRows = 200, kQueries = 9;
  std::vector<float> values = normals(kRows * 2 * kDim);
  // Only the last query may look past row 70.
  std::fill(values.begin() + 70 * 2 * kDim, values.end(), kNan);
  std::vector<const void*> k(kRows), v(kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    k[r] = values.data() + r * 2 * kDim;
    v[r] = values.data() + (r * 2 + 1) * kDim;
  }
  std::vector<int64_t> limits(kQueries, 70);
  limits.back() = kRows;
  const auto query = normals(kQueries * kDim);
  std::vector<float> maximum(kQueries, -kInfinity), sum(kQueries), weighted(kQueries * kDim),
      scratch(kAttendTile * kDim);
  kernels_->attend({k.data(), v.data(), kRows, RowType::kFloat32, RowType::kFloat32, kDim, kDim,
                    kQueries, query.data(), limits.data(), 1, 0, nullptr, maximum.data(),
                    sum.data(), weighted.data(), scratch.data()});
  for (int64_t i = 0; i < kQueries * kDim; ++i) {
    EXPECT_EQ(std::isnan(weighted[i]), i / kDim == kQueries - 1);
  }
}

TEST_P(Simd, Exponentials) {
  for (int64_t count : {0, 1, 15, 16, 17, 33, 1000, 1000000}) {
    auto x = normals(count, 40);
    if (count >= 33) x[3] = kInfinity, x[20] = -kInfinity, x[32] = -0.0f;
    if (count == 1000) x[999] = kNan;
    std::vector<float> expected = normals(count), actual = expected;
    EXPECT_TRUE(same(plain_.sum_exp(x.data(), count, 3), kernels_->sum_exp(x.data(), count, 3)));
    plain_.add_exp(x.data(), count, 3, expected.data());
    kernels_->add_exp(x.data(), count, 3, actual.data());
    expect_same(expected, actual);
  }
}

TEST_P(Simd, ToFloatOfEveryHalf) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = uint16_t(i);
  for (RowType type : kRowTypes) {
    if (has_scale(type)) continue;  // its numbers are read in whole halves alone
    const int64_t all = int64_t(halves.size()) * 2 / size_of(type);
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{63}, all - 1, all}) {
      std::vector<float> expected(all, 7), actual(all, 7);
      plain_.to_float(halves.data(), type, count, expected.data());
      kernels_->to_float(halves.data(), type, count, actual.data());
      expect_same(expected, actual);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Simd,
                         testing::Values(Level{"avx2", avx2_kernels},
                                         Level{"avx512", avx512_kernels}),
                         [](const auto& level) { return std::string(level.param.name); });

}  // namespace
}  // namespace pariskv::cpu
