#include "regions.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <vector>

namespace pariskv {
namespace {

/** The rules told token by token: lists of positions, moved one at a time. */
struct Model {
  RegionSizes sizes;
  std::deque<int64_t> sink, retrieval, local, buffer;
  int64_t total = 0;

  void push() { (int64_t(sink.size()) < sizes.sink ? sink : buffer).push_back(total++); }
  void flush() {
    local.insert(local.end(), buffer.begin(), buffer.end());
    buffer.clear();
    if (total - sizes.local < sizes.opening) return;
    const int64_t end = (total - sizes.local) / sizes.grain * sizes.grain;
    while (int64_t(local.size()) > sizes.local && local.front() < end) {
      retrieval.push_back(local.front());
      local.pop_front();
    }
  }
  void append() {
    push();
    if (int64_t(buffer.size()) >= sizes.update) flush();
  }
  void truncate(int64_t tokens) {
    for (; tokens > 0; --tokens, --total) {
      for (auto* region : {&buffer, &local, &retrieval, &sink}) {
        if (region->empty()) continue;
        region->pop_back();
        break;
      }
    }
    // The local window is filled up again, and a grain that was cut into comes back whole.
    const auto cut = [&] {
      const int64_t end = retrieval.back() + 1;
      return end % sizes.grain != 0 || end < sizes.opening;
    };
    while (!retrieval.empty() && (int64_t(local.size() + buffer.size()) < sizes.local || cut())) {
      local.push_front(retrieval.back());
      retrieval.pop_back();
    }
  }
};

void expect_equal(const Regions& regions, const Model& model) {
  const RegionCounts counts = regions.counts(model.sizes);
  ASSERT_EQ(counts.sink, int64_t(model.sink.size()));
  ASSERT_EQ(counts.retrieval, int64_t(model.retrieval.size()));
  ASSERT_EQ(counts.local, int64_t(model.local.size()));
  ASSERT_EQ(counts.buffer, int64_t(model.buffer.size()));
  ASSERT_EQ(counts.total(), model.total);
  // In order, and each exactly once: the lists one after the other are 0, 1, 2, ...
  int64_t next = 0;
  for (const auto* region : {&model.sink, &model.retrieval, &model.local, &model.buffer}) {
    for (const int64_t position : *region) ASSERT_EQ(position, next++);
  }
}

TEST(Regions, FollowTheTokenByTokenModel) {
  std::mt19937 random(7);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    RegionSizes sizes{pick(0, 5), pick(0, 12), pick(1, 20), round % 2 == 0 ? 1 : pick(2, 9)};
    if (round % 3 == 0) sizes.opening = pick(1, 5) * sizes.grain + 10 / sizes.grain * sizes.grain;
    Model model{sizes, {}, {}, {}, {}};
    Regions regions;
    for (int step = 0; step < 40; ++step) {
      switch (pick(0, 6)) {
        case 0: {
          const int64_t tokens = pick(1, 40);
          for (int64_t t = 0; t < tokens; ++t) model.push();
          model.flush();
          regions = regions.prefilled(tokens, sizes);
          break;
        }
        case 1:
          model.flush();
          regions = regions.flushed(sizes);
          break;
        case 2: {
          const int64_t tokens = pick(0, regions.total());
          model.truncate(tokens);
          regions = regions.truncated(tokens, sizes);
          break;
        }
        case 3: {
          const int64_t tokens = pick(0, 50);
          for (int64_t t = 0; t < tokens; ++t) model.append();
          regions = regions.grown(tokens, sizes);
          break;
        }
        default:
          model.append();
          regions = regions.appended();
          if (regions.flush_due(sizes)) regions = regions.flushed(sizes);
      }
      expect_equal(regions, model);
      const int64_t end = regions.retrieval_end(sizes);
      EXPECT_TRUE(end % sizes.grain == 0 || end == regions.sink_end(sizes)) << end;
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Regions, ChunksEndWhereOnePieceEnds) {
  for (const int64_t grain : {1, 32, 256}) {
    const RegionSizes sizes{4, 256, 512, grain};
    for (const int64_t tokens : {0, 1, 3, 4, 5, 259, 260, 261, 772, 1000, 4096}) {
      const RegionCounts once = Regions().prefilled(tokens, sizes).counts(sizes);
      for (const int64_t chunk : {1, 7, 256, 260, 999}) {
        Regions regions;
        for (int64_t t = 0; t < tokens; t += chunk) {
          regions = regions.prefilled(std::min(chunk, tokens - t), sizes);
        }
        const RegionCounts counts = regions.counts(sizes);
        EXPECT_EQ(counts.sink, once.sink);
        EXPECT_EQ(counts.retrieval, once.retrieval);
        EXPECT_EQ(counts.local, once.local);
        EXPECT_EQ(counts.buffer, once.buffer);
      }
    }
  }
}

}  // namespace
}  // namespace pariskv
