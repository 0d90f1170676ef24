// What the sequences of a step decide together.
#include <gtest/gtest.h>

#include <vector>

#include "step_mode.h"

namespace pariskv {
namespace {

constexpr int64_t kHeads = 8;

StepRules rules() {
  return {.dense_below = 5000, .selects = true, .crossings = {{6000, 80000}, {9000, 160000}}};
}

struct One {
  int64_t total;
  bool near = true;
};

StepBatch decided(const std::vector<One>& all, bool paged = false) {
  StepSum sum(rules(), paged, kHeads);
  for (const One& one : all) sum.add(one.total, one.near);
  return sum.decided();
}

TEST(StepSum, TokensBeyondTheCrossingAddUp) {
  EXPECT_EQ(decided({{15999}}).near_from, kMostTokens);
  EXPECT_EQ(decided({{16000}}).near_from, 6000);
  EXPECT_EQ(decided({{11000}, {10999}}).near_from, kMostTokens);
  EXPECT_EQ(decided({{11000}, {11000}}).near_from, 6000);
}

TEST(StepSum, ShorterSequencesCountForNothing) {
  std::vector<One> many(200, One{5999});
  EXPECT_EQ(decided(many).near_from, kMostTokens);
  many.push_back({16000});
  EXPECT_EQ(decided(many).near_from, 6000);
}

TEST(StepSum, AHostsKernelHasACrossingOfItsOwn) {
  EXPECT_EQ(decided({{28999}}, true).near_from, kMostTokens);
  EXPECT_EQ(decided({{29000}}, true).near_from, 9000);
}

TEST(StepSum, RowsThatAreFarHavePaidForTheWaits) {
  EXPECT_EQ(decided({{7000}, {4999, false}}).near_from, kMostTokens);
  EXPECT_EQ(decided({{7000}, {5000, false}}).near_from, 6000);
  EXPECT_EQ(decided({{7000}, {5000, false}}).holds, kMostTokens);
}

void expect_crossing(const Crossing& found, int64_t tokens, int64_t worth) {
  EXPECT_EQ(found.tokens, tokens);
  EXPECT_EQ(found.worth, worth);
}

TEST(Crossings, FollowFromTheHeadsOfTheModel) {
  const Crossings measured{{6000, 100000}, {9000, 300000}};
  for (const int64_t group : {1, 4}) {  // fewer than four query heads were not measured
    expect_crossing(measured.of_heads(group, 128).own, 6000, 100000);
    expect_crossing(measured.of_heads(group, 128).paged, 9000, 300000);
  }
  expect_crossing(measured.of_heads(8, 256).own, 15000, 50000);
  expect_crossing(measured.of_heads(8, 256).paged, 22500, 225000);
  expect_crossing(measured.of_heads(16, 64).own, 33000, 200000);
}

TEST(StepSum, LengthsAloneDecideWithoutACrossing) {
  StepSum sum(StepRules{.dense_below = 5000, .selects = true}, false, kHeads);
  sum.add(1 << 20, true);
  EXPECT_EQ(sum.decided().near_from, 0);
  EXPECT_EQ(sum.decided().holds, kMostTokens);
}

TEST(StepSum, SaysForHowManyStepsThatHolds) {
  for (std::vector<One> all : {std::vector<One>{{15900}},
                               {{5990}, {15800}},
                               {{5700}, {5999}},
                               {{10990}, {10990}, {6000}},
                               {}}) {
    const StepBatch now = decided(all);
    ASSERT_EQ(now.near_from, kMostTokens);
    for (One& one : all) one.total += now.holds;
    EXPECT_EQ(decided(all).near_from, kMostTokens) << "held for " << now.holds;
  }
  // Of sequences that are all beyond, not a step less than they have.
  EXPECT_EQ(decided({{15900}}).holds, 99);
  EXPECT_EQ(decided({{15999}}).holds, 0);
}

}  // namespace
}  // namespace pariskv
