// The plugin inside a host of ggml: what it claims, and that attention in full through its lists of
// cells is attention. PARISKV_GGML is set by CMake: from=256, dense_below=100000.
#include <gtest/gtest.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <ostream>
#include <random>
#include <set>

#include "sequences.h"

namespace pariskv::ggml {
namespace {

/** Steps of one sequence after a state of 400 tokens. */
StepResult few_steps(const Shape& shape, int64_t steps = 3) {
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, std::min<int64_t>(400, shape.cells - 20));
  StepResult result;
  for (int64_t i = 0; i < steps; ++i) {
    const Token token = chats.append(0);
    result = host.step({token}, chats.visible());
    SCOPED_TRACE(i);
    expect_right(result);
  }
  return result;
}

struct Named {
  const char* name;
  Shape shape;

  friend void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }
};

Shape shape_of(ggml_type key, ggml_type value, int64_t dim = 64) {
  Shape shape;
  shape.key = key, shape.value = value, shape.key_dim = shape.value_dim = dim;
  return shape;
}

class Claims : public testing::TestWithParam<Named> {};

TEST_P(Claims, AndComputes) {
  const StepResult result = few_steps(GetParam().shape);
  EXPECT_EQ(result.ours, GetParam().shape.layers);
  EXPECT_EQ(result.writes, 1) << "those of the first layer's keys tell of all";
}

Shape changed(void (*change)(Shape&)) {
  Shape shape;
  change(shape);
  return shape;
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Claims,
    testing::Values(
        Named{"f16", Shape{}}, Named{"f32", shape_of(GGML_TYPE_F32, GGML_TYPE_F32)},
        Named{"bf16", shape_of(GGML_TYPE_BF16, GGML_TYPE_BF16)},
        Named{"q8_0", shape_of(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0)},
        Named{"q8_0_and_f16", shape_of(GGML_TYPE_Q8_0, GGML_TYPE_F16, 128)},
        Named{"dim_80", shape_of(GGML_TYPE_F16, GGML_TYPE_F16, 80)},
        Named{"dim_256", shape_of(GGML_TYPE_F16, GGML_TYPE_F16, 256)},
        Named{"narrow_values", changed([](Shape& s) { s.key_dim = 192, s.value_dim = 128; })},
        Named{"one_query_head_each", changed([](Shape& s) { s.group = 1, s.kv_heads = 4; })},
        Named{"sinks", changed([](Shape& s) { s.sinks = true; })},
        Named{"softcap", changed([](Shape& s) { s.softcap = 20; })}),
    [](const auto& info) { return info.param.name; });

class Declines : public testing::TestWithParam<Named> {};

TEST_P(Declines, AndTheHostComputes) {
  const StepResult result = few_steps(GetParam().shape);
  EXPECT_EQ(result.ours, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Declines,
    testing::Values(
        Named{"a_bias_of_positions", changed([](Shape& s) { s.max_bias = 8; })},
        Named{"values_that_are_keys", changed([](Shape& s) { s.values_are_keys = true; })},
        Named{"other_tensors", changed([](Shape& s) { s.key_name = "cache_r_l%d"; })},
        Named{"a_name_that_goes_on", changed([](Shape& s) { s.key_name = "cache_k_l%d_x"; })},
        Named{"heads_of_72", shape_of(GGML_TYPE_F16, GGML_TYPE_F16, 72)},
        Named{"few_cells", changed([](Shape& s) { s.cells = 255; })}),
    [](const auto& info) { return info.param.name; });

TEST(Plugin, LeavesShortOnesToTheHost) {
  Shape shape;
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, 60);
  StepResult result;
  for (int i = 0; i < 3; ++i) result = host.step({chats.append(0)}, chats.visible());
  EXPECT_EQ(result.ours, 0);
  EXPECT_EQ(result.writes, 0) << "a short cache costs nothing from its second step on";
  // It grows: first the writes are ours, then the attention.
  chats.load(host, 0, 300);
  for (int i = 0; i < 6; ++i) {
    const Token token = chats.append(0);
    result = host.step({token}, chats.visible());
    expect_right(result);
  }
  EXPECT_EQ(result.ours, shape.layers);
}

TEST(Plugin, SlotsOfOneCacheAndOnesThatAreUsedAgain) {
  Shape shape;
  SmallHost host(shape);
  Sequences chats(shape, 0);
  for (const int64_t id : {0, 1, 2}) chats.load(host, id, 120 + 30 * id);
  const auto step = [&](std::vector<int64_t> ids) {
    std::vector<Token> tokens;
    for (const int64_t id : ids) tokens.push_back(chats.append(id));
    const StepResult result = host.step(tokens, chats.visible());
    expect_right(result);
    return result;
  };
  for (int i = 0; i < 3; ++i) step({0, 1, 2});
  EXPECT_EQ(step({2, 0}).ours, shape.layers);
  chats[1].resize(50);
  step({1, 2});
  chats.erase(0);
  chats.load(host, 3, 140);  // into the cells of 0
  step({3, 1});
  chats.load_again(host, 3);  // others, in the same cells
  step({1, 3});
  chats[5] = chats[2];  // a sequence that begins as another
  step({2, 5});
  step({5, 5, 2});  // a draft of two tokens
  chats[2].erase(chats[2].begin() + 10, chats[2].begin() + 40);
  host.shift_keys();
  EXPECT_EQ(step({2, 5, 3}).ours, shape.layers);
}

TEST(Plugin, ADraftSeesItsOwnTokens) {
  Shape shape;
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, 500);
  for (int i = 0; i < 4; ++i) {
    std::vector<Token> tokens;
    for (int k = 0; k < 5; ++k) tokens.push_back(chats.append(0));
    expect_right(host.step(tokens, chats.visible()));
    chats[0].resize(chats[0].size() - 2);  // two are refused
  }
}

TEST(Plugin, AGraphThatIsUsedAgain) {
  Shape shape;
  SmallHost host(shape);
  Sequences chats(shape, 0);
  chats.load(host, 0, std::min<int64_t>(400, shape.cells - 20));
  host.step({chats.append(0)}, shape.cells);
  host.step({chats.append(0)}, shape.cells);
  for (int i = 0; i < 5; ++i) {
    const StepResult result = host.step({chats.append(0)}, shape.cells, true);
    expect_right(result);
    EXPECT_EQ(result.ours, shape.layers);
    if (i == 2) chats[0].resize(380);
  }
}

TEST(Plugin, StreamsApart) {
  Shape shape;
  shape.streams = 3;
  SmallHost host(shape);
  std::vector<Sequences> chats;
  for (int64_t s = 0; s < 3; ++s) {
    chats.emplace_back(shape, s);
    chats[size_t(s)].load(host, 0, 380 - 40 * s);
  }
  for (int i = 0; i < 4; ++i) {
    std::vector<Token> tokens;
    for (size_t s = i % 2; s < 3; ++s) tokens.push_back(chats[s].append(0));
    const StepResult result = host.step(tokens, 512);
    expect_right(result);
    EXPECT_EQ(result.ours, i == 0 ? 0 : shape.layers);  // not before a graph has run
    if (i == 1) {
      host.copy_stream(1, 2);
      chats[2][0] = chats[1][0];
    }
  }
}

TEST(Plugin, SeveralCachesAtOnce) {
  Shape shape;
  SmallHost one(shape, 1), other(shape, 2);
  Sequences first(shape, 0), second(shape, 0);
  first.load(one, 0, 400);
  second.load(other, 0, 300);
  for (int i = 0; i < 3; ++i) {
    expect_right(one.step({first.append(0)}, first.visible()));
    expect_right(other.step({second.append(0)}, second.visible()));
  }
}

/** Bytes of this process that are in memory, without those that malloc keeps for itself. */
int64_t resident_bytes() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * 4096;
}

TEST(Plugin, MemoryOfACacheEndsWithIt) {
  Shape shape;
  shape.cells = 4096, shape.layers = 4;
  const auto serve = [&] {
    SmallHost host(shape);
    Sequences chats(shape, 0);
    chats.load(host, 0, 4000);
    for (int i = 0; i < 2; ++i) host.step({chats.append(0)}, shape.cells);
  };
  for (int i = 0; i < 3; ++i) serve();
  const int64_t before = resident_bytes();
  for (int i = 0; i < 12; ++i) serve();
  // Summaries and addresses of one such cache take some 5 MB.
  EXPECT_LT(resident_bytes() - before, 512 << 10);
}

TEST(Plugin, SaysWhatItDid) {
  SmallHost::load();
  SmallHost::log();
  few_steps({}, 4);
  const std::string log = SmallHost::log();
  EXPECT_NE(log.find("pariskv: 9 layers' steps, 0 left to the host, 1 sequences read"),
            std::string::npos)
      << log;
}

/**
 * Searched, not in full: a key that a query looks for is found if its summary is that of the
 * numbers that are in its cell now. Every way in which a host writes has its turn.
 */
class Needles : public testing::Test {
 protected:
  void SetUp() override {
    shape_.cells = 3000, shape_.streams = 2;
    host_.emplace(shape_);
    chats_.emplace(shape_, 0);
    chats_->load(*host_, 0, 2500);
    for (int i = 0; i < 3; ++i) step();
    host_->look_for_needle(chats_->operator[](0)[700]);
  }
  StepResult step(int64_t tokens = 1) {
    std::vector<Token> all;
    for (; tokens > 0; --tokens) all.push_back(chats_->append(0));
    return host_->step(all, shape_.cells);
  }
  /** With a needle nearly all is attention to it: without its value nothing is right. */
  void expect_found() {
    for (int i = 0; i < 2; ++i) {
      const StepResult result = step();
      EXPECT_EQ(result.ours, shape_.layers);
      EXPECT_LT(result.worst, .01);
    }
  }

  Shape shape_;
  std::optional<SmallHost> host_;
  std::optional<Sequences> chats_;
};

TEST_F(Needles, AreNotThereBefore) { EXPECT_GT(step().worst, .01); }

TEST_F(Needles, TheLogSaysByHowMuchOutputsAreOff) {
  SmallHost::log();
  for (int i = 0; i < 16; ++i) step();
  host_.reset();
  const std::string log = SmallHost::log();
  const size_t at = log.find(", error 0.");
  ASSERT_NE(at, std::string::npos) << log;
  EXPECT_GT(std::stod(log.substr(at + 8)), 0) << log;
  EXPECT_NE(log.find(", at worst 0."), std::string::npos) << log;
}

TEST_F(Needles, InAStateThatIsLoaded) {
  chats_->load_again(*host_, 0);
  expect_found();
}

TEST_F(Needles, InCellsOfACutThatAPromptUsesAgain) {
  (*chats_)[0].resize(690);
  for (int i = 0; i < 30; ++i) step(60);  // more than a step of ours may have: the host's
  expect_found();
}

TEST_F(Needles, InAStreamThatIsCopied) {
  Sequences other(shape_, 1);
  other[0] = (*chats_)[0];
  host_->load_cells(1, other[0]);
  host_->copy_stream(1, 0);
  expect_found();
}

TEST_F(Needles, InASequenceThatBeginsAsAnother) {
  chats_->load_again(*host_, 0);
  expect_found();
  (*chats_)[1] = (*chats_)[0];
  (*chats_)[1].resize(1500);
  std::vector<Token> both = {chats_->append(0), chats_->append(1)};
  EXPECT_LT(host_->step(both, shape_.cells).worst, .01);
}

/** A host that does anything, in any order. */
void random_host(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random);
  };
  Shape shape;
  shape.layers = 1 + below(2), shape.kv_heads = 1 + below(2), shape.group = 1 + below(3);
  shape.cells = 300 + below(80);
  shape.key = shape.value = GGML_TYPE_F32;  // the host's kernel is exact as well
  SmallHost host(shape, seed);
  Sequences chats(shape, 0);
  chats.load(host, 0, 200, &random);
  for (int i = 0; i < 12; ++i) {
    const int64_t id = below(3);
    switch (below(6)) {
      case 0:
        chats[id].resize(chats[id].size() - size_t(below(int64_t(chats[id].size()) / 2 + 1)));
        break;
      case 1:
        if (chats.free() > 60) chats.load(host, id, 1 + below(50), &random);
        break;
      case 2:
        chats.load_again(host, id);
        break;
      case 3:
        chats[id] = chats[below(3)];
        break;
      case 4:
        if (below(3) == 0) host.shift_keys();
        break;
      default:
        break;
    }
    std::vector<Token> tokens;
    for (int64_t k = 1 + below(3); k > 0 && chats.free() > 1; --k) {
      tokens.push_back(chats.append(below(2) == 0 ? id : below(3)));
    }
    if (tokens.empty()) continue;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", step " + std::to_string(i));
    expect_right(host.step(tokens, shape.cells));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Plugin, FollowsAnyHost) {
  const char* given = std::getenv("PARISKV_SCHEDULES");
  const int schedules = given == nullptr ? 100 : std::atoi(given);
  for (int seed = 0; seed < schedules && !testing::Test::HasFailure(); ++seed) {
    random_host(uint32_t(seed));
  }
}

}  // namespace
}  // namespace pariskv::ggml
