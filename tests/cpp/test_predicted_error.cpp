// The error that a step predicts: where it is written, and what refuses.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support.h"

namespace pariskv {
namespace {

using test::Rows;

/** A sequence of 1300 tokens, of which steps search. */
struct ErrorScene {
  explicit ErrorScene(TailRule tail = TailRule::kSample) : cache(config_of(tail)), id(cache.add()) {
    test::Driver{cache, id, 1}.prefill(1300);
  }

  static Config config_of(TailRule tail) {
    Config config = test::small_config();
    ParisKV policy;
    policy.top_k = 40, policy.block = 64, policy.tail = tail, policy.tail_rows = 16;
    config.policy = policy;
    config.dense_below = 0;
    return config;
  }

  TensorView view_of(std::vector<float>& numbers, int64_t heads) const {
    return TensorView::contiguous(numbers.data(), DType::kFloat32, {1, heads}, {});
  }

  /** What a call with these options says that it refuses; empty: it did not. */
  std::string decode(const AttendOptions& options) {
    return said([&](Rows& q, Rows& out) { cache.decode(0, {id}, q.view(), out.view(), options); });
  }
  std::string attend(const AttendOptions& options) {
    return said(
        [&](Rows& q, Rows& out) { cache.attend(0, {id}, {1}, q.view(), out.view(), options); });
  }
  std::string said(const std::function<void(Rows&, Rows&)>& call) {
    Rows q(1, cache.config().query_heads, cache.config().head_dim, 7), out = q;
    try {
      call(q, out);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  }

  Cache cache;
  SequenceId id;
};

bool mentions(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(PredictedError, IsWrittenForEachKvHead) {
  ErrorScene scene;
  const int64_t heads = scene.cache.config().kv_heads;
  std::vector<float> errors(static_cast<size_t>(heads) + 1, -1.0f);
  AttendOptions options;
  options.error = scene.view_of(errors, heads);
  EXPECT_EQ(scene.decode(options), "");
  for (int64_t head = 0; head < heads; ++head) EXPECT_GT(errors[size_t(head)], 0) << head;
  EXPECT_EQ(errors.back(), -1.0f);
  EXPECT_GT(scene.cache.stats().worst_error, 0);
}

TEST(PredictedError, OfOtherShapesIsRefused) {
  ErrorScene scene;
  const Config& config = scene.cache.config();
  std::vector<float> errors(64);
  AttendOptions options;
  options.error = scene.view_of(errors, config.kv_heads + 1);
  EXPECT_TRUE(mentions(scene.decode(options), "[decode] error: expected")) << scene.decode(options);
  options.error = scene.view_of(errors, config.kv_heads);
  options.error->dtype = DType::kFloat16;
  EXPECT_TRUE(mentions(scene.decode(options), "[decode] error: expected")) << scene.decode(options);
}

TEST(PredictedError, SharesNoMemoryWithTheLogSumExps) {
  ErrorScene scene;
  const Config& config = scene.cache.config();
  std::vector<float> numbers(64);
  AttendOptions options;
  options.error = scene.view_of(numbers, config.kv_heads);
  options.lse = scene.view_of(numbers, config.query_heads);
  EXPECT_TRUE(mentions(scene.decode(options), "[decode] error")) << scene.decode(options);
}

TEST(PredictedError, IsOfDecodeAlone) {
  ErrorScene scene;
  std::vector<float> errors(64);
  AttendOptions options;
  options.error = scene.view_of(errors, scene.cache.config().kv_heads);
  const char* refused = "error: expected none: decode alone writes it";
  EXPECT_TRUE(mentions(scene.attend(options), refused)) << scene.attend(options);
  const std::string explained = scene.said([&](Rows& q, Rows&) {
    TensorView query = q.view();
    query = TensorView::contiguous(query.data, query.dtype, {query.shape[1], query.shape[2]}, {});
    scene.cache.explain(0, scene.id, query, options);
  });
  EXPECT_TRUE(mentions(explained, refused)) << explained;
}

TEST(PredictedError, NeedsASample) {
  ErrorScene scene(TailRule::kNone);
  std::vector<float> errors(64);
  AttendOptions options;
  options.error = scene.view_of(errors, scene.cache.config().kv_heads);
  EXPECT_TRUE(mentions(scene.decode(options), "expected a policy that estimates its error"));
  ParisKV policy = std::get<ParisKV>(scene.cache.config().policy);
  policy.error = .1;
  EXPECT_THROW(policy.validate(), std::invalid_argument);
}

}  // namespace
}  // namespace pariskv
