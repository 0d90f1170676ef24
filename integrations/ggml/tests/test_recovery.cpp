// What the plugin leaves to the host, how it says so, and that it serves again afterwards.
#include <gtest/gtest.h>

#include <string>

#include "sequences.h"

namespace pariskv::ggml {
namespace {

bool says(const std::string& log, const std::string& what) {
  return log.find("pariskv: " + what) != std::string::npos;
}

/** Aborted at each question in turn: between layers, and within one. */
TEST(Recovery, AbortedStepsAreTakenUpAgain) {
  SmallHost::load();
  SmallHost::log();
  Shape shape;
  SmallHost host(shape);
  for (int64_t questions = 1; questions < 12; ++questions) {
    SCOPED_TRACE(questions);
    Sequences chats(shape, 0);
    chats.load(host, 0, 236);
    for (int i = 0; i < 2; ++i) expect_right(host.step({chats.append(0)}, shape.cells));
    chats.load(host, 0, 120);  // a prompt: more than the layers have read
    host.abort_after(questions);
    const StepResult aborted = host.step({chats.append(0)}, shape.cells);
    if (questions < shape.layers) {
      EXPECT_TRUE(aborted.aborted);
    }
    chats[0].pop_back();  // llama.cpp takes its cells back
    for (int i = 0; i < 3; ++i) {
      const StepResult result = host.step({chats.append(0)}, shape.cells);
      expect_right(result);
      EXPECT_EQ(result.ours, shape.layers);
    }
  }
  const std::string log = SmallHost::log();
  EXPECT_FALSE(says(log, "left to the host for")) << log;
}

TEST(Recovery, WithoutFlashAttentionNothingIsClaimed) {
  SmallHost::load();
  SmallHost::log();
  Shape shape;
  shape.flash = false;
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, 400);
  for (int i = 0; i < 4; ++i) {
    const StepResult result = host.step({chats.append(0)}, shape.cells);
    EXPECT_EQ(result.ours, 0);
    EXPECT_EQ(result.writes, i == 0 ? 1 : 0);
  }
  const std::string log = SmallHost::log();
  EXPECT_TRUE(says(log, "left to the host: no attention reads this cache in place")) << log;
}

TEST(Recovery, LinesSayWhatIsLeftAndWhy) {
  SmallHost::load();
  const auto log_of = [](const Shape& shape, int64_t tokens) {
    SmallHost::log();
    SmallHost host(shape);
    Sequences chats(shape, 0);
    chats.load(host, 0, tokens);
    for (int i = 0; i < 3; ++i) host.step({chats.append(0)}, chats.visible());
    return SmallHost::log();
  };
  Shape shape;
  EXPECT_TRUE(says(log_of(shape, 60), "left to the host: steps over fewer than 256 cells"));
  EXPECT_FALSE(says(log_of(shape, 400), "left to the host"));
  shape.cells = 200;
  EXPECT_TRUE(says(log_of(shape, 60),
                   "left to the host: steps over fewer than 256 cells, and this cache has 200"));
  shape = {};
  shape.max_bias = 8;
  EXPECT_TRUE(says(log_of(shape, 400), "left to the host: logits have a bias by position"));
  shape = {};
  shape.key_dim = shape.value_dim = 72;
  EXPECT_TRUE(says(log_of(shape, 400), "left to the host: [config] head_dim: expected"));
}

TEST(Recovery, AWindowOverAWholeCacheIsLeftAndThenServed) {
  SmallHost::load();
  SmallHost::log();
  Shape shape;
  shape.key = shape.value = GGML_TYPE_F32;  // the host's kernel is exact as well
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, 300);
  int64_t served = 0;
  for (int i = 0; i < 60; ++i) {
    chats[0].erase(chats[0].begin());
    const StepResult result = host.step({chats.append(0)}, shape.cells);
    expect_right(result);
    served += result.ours > 0;
  }
  EXPECT_LT(served, 8) << "attention, and not only its summaries, is the host's";
  EXPECT_TRUE(says(SmallHost::log(), "left to the host for 64 steps: cells that a token sees"));
  for (int i = 0; i < 70; ++i) expect_right(host.step({chats.append(0)}, shape.cells));
  EXPECT_EQ(host.step({chats.append(0)}, shape.cells).ours, shape.layers);
}

/** Of a cache of SmolLM2's shape. */
TEST(Recovery, PromptsThatAreOverGiveTheirMemoryBack) {
  SmallHost::load();
  SmallHost::log();
  {
    Shape shape;
    shape.kv_heads = 3, shape.layers = 2, shape.cells = 2048;
    SmallHost host(shape);
    Sequences chats(shape, 0);
    for (int prompt = 0; prompt < 24; ++prompt) {
      chats[0].resize(size_t(prompt == 0 ? 0 : 256));
      chats.load(host, 0, (prompt == 0 ? 256 : 0) + 1600 + prompt % 5);
      for (int i = 0; i < 3; ++i) host.step({chats.append(0)}, shape.cells);
    }
  }
  const std::string log = SmallHost::log();
  const size_t end = log.rfind(" % of the cache");
  ASSERT_NE(end, std::string::npos) << log;
  const size_t begin = log.rfind(' ', end - 1) + 1;
  EXPECT_LE(std::stoi(log.substr(begin, end - begin)), 20) << log;
}

/** With PARISKV_GGML=memory=2: a cache whose summaries do not fit, and then do. */
TEST(Budget, IsReachedAndServedAgainBelowIt) {
  SmallHost::load();
  SmallHost::log();
  Shape shape;
  shape.kv_heads = 4, shape.cells = 4096, shape.layers = 8;
  shape.key = shape.value = GGML_TYPE_F32;
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, 4000);
  for (int i = 0; i < 3; ++i) host.step({chats.append(0)}, shape.cells);  // searched: not exact
  EXPECT_TRUE(says(SmallHost::log(), "left to the host for 64 steps: "));
  EXPECT_EQ(host.step({chats.append(0)}, shape.cells).ours, 0);
  chats[0].resize(300);
  StepResult result;
  for (int i = 0; i < 66; ++i) {
    result = host.step({chats.append(0)}, shape.cells);
    expect_right(result);
  }
  EXPECT_EQ(result.ours, shape.layers) << SmallHost::log();
}

}  // namespace
}  // namespace pariskv::ggml
