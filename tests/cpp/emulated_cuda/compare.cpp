// What has to be equal bit for bit, and what has to be close.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "cases.h"

namespace pariskv::test {

namespace {

template <typename T>
void expect_equal(const char* what, const std::vector<T>& expected, const std::vector<T>& actual) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&expected[i], &actual[i], sizeof(T)) == 0) continue;
    ADD_FAILURE() << what << " " << i << " of " << expected.size() << ": " << +actual[i]
                  << " instead of " << +expected[i];
    return;  // the rest is rarely better
  }
}

bool is_close(float a, float b, double relative, double absolute) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::fabs(double(a) - b) <= absolute + relative * std::fabs(a);
}
void expect_close(const char* what, const std::vector<float>& expected,
                  const std::vector<float>& actual, double relative, double absolute) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (is_close(expected[i], actual[i], relative, absolute)) continue;
    ADD_FAILURE() << what << " " << i << " of " << expected.size() << ": " << actual[i]
                  << " instead of " << expected[i];
    return;
  }
}

/**
 * How far two backends' shares of the attention may be apart: worths differ in their last bits, so
 * a budget may be reached one row later.
 */
constexpr double kMassApart = .01;
/** And their errors, as a share. */
constexpr double kErrorApart = .02;

/** Of two tensors, as a share of their size: what is not finite in either is left out. */
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) continue;
    apart += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    size += double(a[i]) * a[i];
  }
  return size > 0 ? std::sqrt(apart / size) : std::sqrt(apart);
}

/** All of a tensor, as floats. */
std::vector<float> elements(const Tensor& t) {
  std::vector<float> all;
  for (int64_t i = 0; i < t.tokens; ++i) {
    for (int64_t h = 0; h < t.heads; ++h) {
      for (int64_t d = 0; d < t.dim; ++d) {
        const float x = t.get(i, h, d);
        all.push_back(std::isnan(x) ? NAN : x);  // one NaN is as good as another
      }
    }
  }
  return all;
}

/** A row that both selected: its kv head, and where each has it in its order. */
struct CommonRow {
  int64_t head, expected, actual;
};

std::vector<CommonRow> common_rows(const Explanation& expected, const Explanation& actual) {
  std::vector<CommonRow> common;
  for (int64_t h = 0; h < expected.kv_heads; ++h) {
    std::map<int64_t, int64_t> places;
    for (int64_t i = 0; i < expected.selected; ++i) {
      places[expected.positions[size_t(h * expected.selected + i)]] = i;
    }
    places.erase(-1);  // a head with fewer rows than others
    for (int64_t i = 0; i < actual.selected; ++i) {
      const auto found = places.find(actual.positions[size_t(h * actual.selected + i)]);
      if (found != places.end()) common.push_back({h, found->second, i});
    }
  }
  return common;
}

/** Numbers (heads, selected) of one of two explanations. */
struct Numbers {
  const std::vector<float>& of;
  int64_t selected;
};

/** Those of the rows that both selected: a kv head has `group` of the heads. */
void expect_close_rows(const char* what, const std::vector<CommonRow>& rows, int64_t group,
                       const Numbers& expected, const Numbers& actual, double relative,
                       double absolute) {
  std::vector<float> a, b;
  for (const CommonRow& row : rows) {
    for (int64_t head = row.head * group; head < (row.head + 1) * group; ++head) {
      a.push_back(expected.of[size_t(head * expected.selected + row.expected)]);
      b.push_back(actual.of[size_t(head * actual.selected + row.actual)]);
    }
  }
  expect_close(what, a, b, relative, absolute);
}

/** Rows of all kv heads. */
int64_t rows_of(const Explanation& explanation) {
  const std::vector<int64_t>& positions = explanation.positions;
  return int64_t(positions.size()) - std::count(positions.begin(), positions.end(), -1);
}

/** Of PRKV: all of it is equal but for logits, which are made of rows. */
void compare_pages(const Explanation& expected, const Explanation& actual) {
  const auto& mine = std::get<PRKVExplanation>(expected.details);
  const auto& theirs = std::get<PRKVExplanation>(actual.details);
  EXPECT_EQ(mine.static_rows, theirs.static_rows);
  EXPECT_EQ(mine.first_page, theirs.first_page);
  expect_equal("kept row", expected.kept, actual.kept);
  expect_equal("page", mine.pages, theirs.pages);
  expect_equal("score of a page", mine.page_scores, theirs.page_scores);
  expect_equal("position", expected.positions, actual.positions);
  expect_equal("worth", expected.worth, actual.worth);
  expect_close("exact logit", expected.exact, actual.exact, 1e-3, 1e-3);
}

void compare_explanations(const Explanation& expected, const Explanation& actual, bool is_twin,
                          bool has_budget) {
  ASSERT_EQ(expected.searched, actual.searched);
  if (std::holds_alternative<PRKVExplanation>(expected.details))
    return compare_pages(expected, actual);
  if (!has_budget) ASSERT_EQ(expected.selected, actual.selected);
  if (!expected.searched) return;  // there are no rows
  const auto& mine = std::get<ParisKVExplanation>(expected.details);
  const auto& theirs = std::get<ParisKVExplanation>(actual.details);
  expect_equal("coarse score", mine.coarse, theirs.coarse);
  expect_equal("candidate", mine.candidate_positions, theirs.candidate_positions);
  if (is_twin) expect_equal("position", expected.positions, actual.positions);
  // Estimates differ in their last bits between backends, so rows of equal worth may trade places.
  const std::vector<CommonRow> rows = common_rows(expected, actual);
  const int64_t all = std::max(rows_of(expected), rows_of(actual));
  EXPECT_LE(all - int64_t(rows.size()), all / 10) << "rows selected otherwise";
  const auto compare = [&](const char* what, const std::vector<float>& a,
                           const std::vector<float>& b, int64_t group, double absolute) {
    expect_close_rows(what, rows, group, {a, expected.selected}, {b, actual.selected}, 1e-3,
                      absolute);
  };
  const int64_t group = expected.query_heads / expected.kv_heads;
  compare("estimated logit", mine.estimated, theirs.estimated, group, 1e-3);
  compare("exact logit", expected.exact, actual.exact, group, 1e-3);
  compare("worth", expected.worth, actual.worth, 1, 1e-7);
  if (is_twin) {
    expect_equal("mass", mine.mass, theirs.mass);
    expect_equal("error", mine.error, theirs.error);
  }
  expect_close("mass", mine.mass, theirs.mass, 0, kMassApart);
  expect_close("error", mine.error, theirs.error, kErrorApart, 1e-6);
}

void compare_summaries(const Summaries& expected, const Summaries& actual) {
  expect_equal("signs", expected.signs, actual.signs);
  expect_equal("magnitude", expected.magnitudes, actual.magnitudes);
  expect_equal("weight", expected.weights, actual.weights);
  expect_equal("norm", expected.norms, actual.norms);
  expect_equal("mean", expected.means, actual.means);
  expect_equal("balance", expected.balance, actual.balance);
  expect_equal("middle of a page", expected.middles, actual.middles);
  expect_equal("distance from it", expected.distances, actual.distances);
}

/** Weights of 8 or 11 bits: the root of their rounding's mean square, and the output's own. */
void compare_fast(const Case& c, const Outcome& expected, const Outcome& actual) {
  SCOPED_TRACE("Precision::kFast");
  const std::vector<float> exact = elements(actual.outputs.back());
  const std::vector<float> fast = elements(actual.fast[0]);
  if (c.config.dtype == DType::kFloat32) return expect_equal("element", exact, fast);
  const bool is_half = c.config.dtype == DType::kFloat16;
  const double tolerance = is_half ? 4e-3 : 3e-2, root = is_half ? 4e-4 : 3e-3;
  const std::vector<float> truth = elements(expected.outputs.back());
  expect_close("element", truth, fast, tolerance, tolerance);
  EXPECT_LE(distance(truth, fast), root) << "of the whole";
  EXPECT_GT(distance(exact, fast), 0) << "rounding weights changes nothing";
}

void compare_stats(const Stats& expected, const Stats& actual, bool is_twin, bool has_budget) {
  EXPECT_EQ(expected.flushes, actual.flushes);
  EXPECT_EQ(expected.encoded_keys, actual.encoded_keys);
  EXPECT_EQ(expected.unusable_keys, actual.unusable_keys);
  EXPECT_EQ(expected.decode_tokens, actual.decode_tokens);
  EXPECT_EQ(expected.searched_tokens, actual.searched_tokens);
  EXPECT_EQ(expected.candidates, actual.candidates);
  const int64_t apart = std::abs(expected.fetched_rows - actual.fetched_rows);
  EXPECT_LE(apart, is_twin || !has_budget ? 0 : 2 + expected.fetched_rows / 50) << "rows";
  const auto expect_close_number = [&](const char* what, double a, double b, double relative,
                                       double absolute) {
    EXPECT_TRUE(is_close(float(a), float(b), is_twin ? 0 : relative, is_twin ? 0 : absolute))
        << what << ": " << b << " instead of " << a;
  };
  expect_close_number("mass", expected.mean_mass, actual.mean_mass, 0, kMassApart);
  expect_close_number("least mass", expected.least_mass, actual.least_mass, 0, kMassApart);
  expect_close_number("error", expected.mean_error, actual.mean_error, kErrorApart, 1e-6);
  expect_close_number("worst error", expected.worst_error, actual.worst_error, kErrorApart, 1e-6);
  EXPECT_EQ(expected.keeps, actual.keeps);
}

}  // namespace

void compare(const Case& c, const Outcome& expected, const Outcome& actual, bool is_twin) {
  const auto* search = std::get_if<ParisKV>(&c.config.policy);
  const bool has_tail = search != nullptr && search->resolved().tail == TailRule::kSample;
  const bool has_budget = search != nullptr && search->error.has_value();
  const DType dtype = c.config.dtype;
  const double tolerance = dtype == DType::kFloat32 ? 2e-4 : dtype == DType::kFloat16 ? 4e-3 : 3e-2;
  // Two roundings to 8 or 11 bits; what is added up in another order is below that.
  const double root = dtype == DType::kFloat32 ? 2e-5 : dtype == DType::kFloat16 ? 3e-4 : 2e-3;
  ASSERT_EQ(expected.fast.size(), actual.fast.size());
  ASSERT_EQ(actual.fast.size(), c.fast ? 1u : 0u);
  if (c.fast) compare_fast(c, expected, actual);
  ASSERT_EQ(expected.outputs.size(), actual.outputs.size());
  for (size_t i = 0; i < expected.outputs.size(); ++i) {
    SCOPED_TRACE("output " + std::to_string(i));
    const std::vector<float> a = elements(expected.outputs[i]), b = elements(actual.outputs[i]);
    // What the steps put out does not depend on the device; attend cuts its work by processors.
    if (is_twin && int64_t(i) < c.steps) expect_equal("element", a, b);
    expect_close("element", a, b, tolerance, tolerance);
    EXPECT_LE(distance(a, b), root) << "of the whole";
    EXPECT_TRUE(actual.outputs[i].gaps_are_clean());
  }
  for (size_t i = 0; i < expected.log_sum_exps.size(); ++i) {
    const std::vector<float>&a = expected.log_sum_exps[i], &b = actual.log_sum_exps[i];
    if (is_twin) expect_equal("log-sum-exp", a, b);
    ASSERT_EQ(a.size(), b.size());
    float largest = 0;
    for (const float x : a) largest = std::isfinite(x) ? std::max(largest, std::fabs(x)) : largest;
    for (size_t j = 0; j < a.size(); ++j) {
      // A row of the tail whose logit is huge may count with that of its copy in 8 bits. Its
      // rounding goes with the length of the key, not with a logit, which may happen to be small.
      const double absolute = has_tail && std::fabs(a[j]) > 1e3f ? .02 * largest : 1e-3;
      EXPECT_TRUE(is_close(a[j], b[j], 1e-4, absolute))
          << "log-sum-exp " << j << ": " << b[j] << " instead of " << a[j];
    }
  }
  ASSERT_EQ(expected.errors.size(), actual.errors.size());
  for (size_t i = 0; i < expected.errors.size(); ++i) {
    if (is_twin) expect_equal("error", expected.errors[i], actual.errors[i]);
    expect_close("error", expected.errors[i], actual.errors[i], kErrorApart, 1e-6);
  }
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    expect_equal("row", elements(expected.rows[i]), elements(actual.rows[i]));
  }
  for (size_t i = 0; i < expected.explanations.size(); ++i) {
    compare_explanations(expected.explanations[i], actual.explanations[i], is_twin, has_budget);
    compare_summaries(expected.summaries[i], actual.summaries[i]);
  }
  ASSERT_EQ(expected.files.size(), actual.files.size());
  for (size_t i = 0; i < expected.files.size(); ++i) {
    EXPECT_TRUE(expected.files[i] == actual.files[i]) << "file " << i;
  }
  ASSERT_EQ(expected.kept.size(), actual.kept.size());
  for (size_t i = 0; i < expected.kept.size(); ++i) {
    SCOPED_TRACE("number " + std::to_string(i) + " of what was kept");
    expect_equal("position", expected.kept[i], actual.kept[i]);
  }
  ASSERT_EQ(expected.page_scores.size(), actual.page_scores.size());
  for (size_t i = 0; i < expected.page_scores.size(); ++i) {
    SCOPED_TRACE("number " + std::to_string(i) + " of the scores");
    expect_equal("score of a page", expected.page_scores[i], actual.page_scores[i]);
  }
  compare_stats(expected.stats, actual.stats, is_twin, has_budget);
  if (search == nullptr) {  // of ParisKV, a GPU alone keeps rows
    EXPECT_EQ(expected.stats.kept_rows, actual.stats.kept_rows);
  }
  if (const auto* policy = std::get_if<HardKV>(&c.config.policy)) {
    EXPECT_GT(actual.stats.keeps, 0);
    EXPECT_EQ(expected.stats.dropped_rows, actual.stats.dropped_rows);
    EXPECT_EQ(policy->placement == ZoneRows::kDropped, actual.stats.dropped_rows > 0);
  }
}

}  // namespace pariskv::test
