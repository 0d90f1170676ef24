// Rows that leave a GPU only when there is no room: what is given fits, and comes back as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"
#include "tuning.h"

namespace pariskv {

namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kTokens = 1000;

Config config_of(int64_t budget, KVDType rows) {
  Config config = test::small_config(kLayers, 2 * kHeads, kHeads, kDim);
  config.placement = Placement::kAuto;
  config.memory_budget = budget;
  config.kv_dtype = rows;
  std::get<ParisKV>(config.policy).top_k = 8;
  return config;
}

class FakeAuto : public testing::TestWithParam<KVDType> {
 protected:
  SequenceId add(Cache& cache) {
    const SequenceId sequence = cache.add();
    for (int64_t layer = 0; layer < kLayers; ++layer) prefill(cache, sequence, layer);
    return sequence;
  }
  void prefill(Cache& cache, SequenceId sequence, int64_t layer, int64_t tokens = kTokens) {
    const TensorView rows = view(numbers_, tokens);
    cache.prefill(layer, {sequence}, {tokens}, rows, rows);
  }
  void decode(Cache& cache, SequenceId sequence) {
    decode(cache, std::vector<SequenceId>{sequence});
  }
  void decode(Cache& cache, const std::vector<SequenceId>& batch) {
    const int64_t count = int64_t(batch.size());
    const TensorView row = view(numbers_, count), q = view(numbers_, count, 2);
    out_.resize(size_t(count * 2 * kHeads * kDim));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      cache.decode(layer, batch, q, row, row, view(out_, count, 2));
    }
  }

  /** Until all work is done and rows that travelled have arrived. */
  static void settle(Cache& cache) {
    for (int i = 0; i < 2; ++i) {  // a flush sends rows on their way; the next takes note of them
      test::finish_all();
      cache.flush(std::vector<SequenceId>{});
    }
  }

  /** Once these are gone. */
  static void expect_nothing_left(Cache& cache, const std::vector<SequenceId>& sequences) {
    for (const SequenceId sequence : sequences) cache.remove(sequence);
    settle(cache);
    EXPECT_EQ(cache.stats().offloaded_bytes, 0);
    EXPECT_EQ(test::wrong(), "");
  }

 private:
  static TensorView view(std::vector<uint16_t>& numbers, int64_t tokens, int64_t group = 1) {
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, group * kHeads, kDim},
                                  {DeviceType::kCuda, test::kDevice});
  }
  std::vector<uint16_t> numbers_ = std::vector<uint16_t>(kTokens * kHeads * kDim);
  std::vector<uint16_t> out_ = std::vector<uint16_t>(2 * kHeads * kDim);
};

TEST_P(FakeAuto, NothingLeavesWhileThereIsRoom) {
  Cache cache(config_of(0, GetParam()));
  for (int i = 0; i < 4; ++i) decode(cache, add(cache));
  EXPECT_EQ(cache.stats().offloaded_bytes, 0);
  EXPECT_EQ(cache.stats().host_memory.live, 0);
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeAuto, AskedForByBatchASearchBeginsOnceTheSequencesAreWorthIt) {
  Config config = config_of(0, GetParam());
  config.dense_below = kDenseByBatch;
  Cache cache(config);
  std::vector<SequenceId> batch = {cache.add()};
  for (int i = 0; i < 8; ++i) {  // 8,000 tokens
    for (int64_t layer = 0; layer < kLayers; ++layer) prefill(cache, batch[0], layer);
  }
  const auto searched = [&] {
    const int64_t before = cache.stats().searched_tokens;
    decode(cache, batch);
    return cache.stats().searched_tokens - before;
  };
  // In 8 bits nothing of a zone can be read as it came.
  const bool narrow = GetParam() == KVDType::kInt8;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(searched(), narrow ? kLayers : 0);
  while (batch.size() < 54) batch.push_back(cache.fork(batch[0]));
  const Crossing at = cuda::tuning_of(test::kDevice).crossings.of_heads(2, kDim).own;
  const int64_t all = int64_t(batch.size()) * kLayers;
  int64_t total = 8003, before = 0, after = 0;
  while (after < 3) {
    ++total;
    const bool worth = int64_t(batch.size()) * (total - at.tokens) * kHeads >= at.worth;
    EXPECT_EQ(searched(), worth || narrow ? all : 0) << total;
    ++(worth ? after : before);
  }
  EXPECT_GT(before, 0);
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeAuto, ByDefaultASearchBeginsAtOneLengthInEveryBatch) {
  Config config = config_of(0, GetParam());
  config.dense_below = -1;
  EXPECT_EQ(config.searched_from(), ParisKV::kRegions.dense_below_on_gpu);
  Cache cache(config);
  std::vector<SequenceId> batch = {cache.add()};
  for (int i = 0; i < 9; ++i) {  // 9,000 tokens
    for (int64_t layer = 0; layer < kLayers; ++layer) prefill(cache, batch[0], layer);
  }
  for (; batch.size() < 20; batch.push_back(cache.add())) {
    const int64_t before = cache.stats().searched_tokens;
    decode(cache, batch);
    EXPECT_EQ(cache.stats().searched_tokens - before, kLayers) << batch.size();
  }
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeAuto, ReservedMemoryServesPromptsOfEveryPlacement) {
  for (const Placement placement : {Placement::kAuto, Placement::kHost, Placement::kDevice}) {
    Config config = config_of(64 << 20, GetParam());
    config.placement = placement;
    {
      Cache probe(config);
      probe.reserve(4 * kTokens, 4);
      config.host_budget = probe.stats().host_memory.reserved;  // no slab more
    }
    Cache cache(config);
    cache.reserve(4 * kTokens, 4);
    const Stats before = cache.stats();
    const bool in_host = placement == Placement::kHost;
    EXPECT_EQ(before.host_memory.reserved > 0, in_host);
    std::vector<SequenceId> sequences;
    for (int i = 0; i < 4; ++i) sequences.push_back(add(cache));
    settle(cache);
    const Stats after = cache.stats();
    EXPECT_EQ(after.host_memory.live > 0, in_host);
    EXPECT_EQ(after.host_memory.reserved, before.host_memory.reserved);
    for (const SequenceId sequence : sequences) cache.remove(sequence);
    EXPECT_GE(cache.stats().memory.reserved, before.memory.reserved);
    cache.trim();
    EXPECT_EQ(cache.stats().host_memory.reserved, 0);
    EXPECT_EQ(test::wrong(), "");
  }
}

TEST_P(FakeAuto, RowsThatLeaveFindHostMemoryThatIsReservedInTheBackground) {
  Cache cache(config_of(12 << 20, GetParam()));
  EXPECT_THROW(cache.reserve_host(0, true), std::invalid_argument);
  cache.reserve_host(16 << 20, true);
  const int64_t reserved = cache.stats().host_memory.reserved;
  EXPECT_GE(reserved, (16 << 20) - (1 << 20));
  EXPECT_LE(reserved, 18 << 20);
  std::vector<SequenceId> sequences;
  while (cache.stats().offloaded_bytes < 4 << 20) {
    ASSERT_LT(sequences.size(), 200u);
    sequences.push_back(add(cache));
  }
  EXPECT_EQ(cache.stats().host_memory.reserved, reserved) << "something was taken anew";
  for (const SequenceId sequence : sequences) cache.remove(sequence);
  settle(cache);
  cache.trim();
  EXPECT_EQ(cache.stats().host_memory.reserved, 0);
  cache.reserve_host(64 << 20, true);  // most of it is still to come when the cache ends
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeAuto, WhatDoesNotFitRuns) {
  constexpr int64_t kBudget = 12 << 20;
  Cache cache(config_of(kBudget, GetParam()));
  std::vector<SequenceId> sequences;
  while (cache.stats().offloaded_bytes < kBudget / 2) {
    ASSERT_LT(sequences.size(), 200u);
    sequences.push_back(add(cache));
    decode(cache, sequences.back());
    decode(cache, sequences[sequences.size() / 2]);
    EXPECT_LE(cache.stats().memory.reserved, kBudget);
  }
  expect_nothing_left(cache, sequences);
}

TEST_P(FakeAuto, SequencesBeginOnADeviceThatIsFullOfRows) {
  Cache cache(config_of(12 << 20, GetParam()));
  std::vector<SequenceId> all;
  while (cache.stats().offloaded_bytes == 0) all.push_back(add(cache));
  for (int i = 0; i < 5000; ++i) all.push_back(cache.add());  // more than are ready of their size
  EXPECT_GT(cache.stats().offloaded_bytes, 0);
  expect_nothing_left(cache, all);
}

TEST_P(FakeAuto, RowsComeBackWhenThereIsRoom) {
  constexpr int64_t kBudget = 12 << 20;
  Cache cache(config_of(kBudget, GetParam()));
  std::vector<SequenceId> sequences;
  while (cache.stats().offloaded_bytes < kBudget / 4) {
    ASSERT_LT(sequences.size(), 200u);
    sequences.push_back(add(cache));
  }
  const SequenceId first = sequences.front();
  for (size_t i = 1; i < sequences.size(); ++i) cache.remove(sequences[i]);
  const int64_t left = cache.stats().offloaded_bytes;
  ASSERT_GT(left, 0);
  for (int i = 0; i < 400 && cache.stats().offloaded_bytes > 0; ++i) {
    decode(cache, first);
    test::finish_all();
  }
  EXPECT_EQ(cache.stats().offloaded_bytes, 0);
  EXPECT_EQ(cache.stats().host_memory.live, 0);
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeAuto, RowsOfRestingSequencesAreCopiedBeforeTheDeviceIsFull) {
  constexpr int64_t kBudget = 16 << 20;
  Cache cache(config_of(kBudget, GetParam()));
  cache.reserve_host(32 << 20, false);
  std::vector<SequenceId> sequences;
  const auto fill = [&](int64_t live) {
    while (cache.stats().memory.live < live) {
      ASSERT_LT(sequences.size(), 200u);
      sequences.push_back(add(cache));
    }
  };
  // Calls that name another sequence, until all others rest and their copies are there.
  const auto rest = [&](SequenceId awake) {
    for (int i = 0; i < 200; ++i) {
      decode(cache, awake);
      test::finish_all();
    }
  };
  fill(kBudget / 8);
  rest(sequences.front());
  EXPECT_EQ(cache.stats().host_memory.live, 0) << "there is room";
  fill(kBudget * 13 / 16);
  rest(sequences.front());
  const Stats full = cache.stats();
  EXPECT_EQ(full.offloaded_bytes, 0) << "they are read where they were";
  EXPECT_GE(full.host_memory.live, kBudget / 16 - (kBudget >> 6));
  EXPECT_LE(full.host_memory.live, kBudget / 4);

  // New ones find room without waiting for a copy: the oldest that rest are forgotten. Here nothing
  // is copied, and no event passes, unless somebody waits for it.
  test::fault_switches().nothing_by_chance = true;
  fill(kBudget * 7 / 8);
  for (int i = 0; i < 4; ++i) sequences.push_back(add(cache));
  test::fault_switches().nothing_by_chance = false;
  EXPECT_GT(cache.stats().offloaded_bytes, 0);
  EXPECT_EQ(test::wrong(), "");
  for (const SequenceId sequence : sequences) decode(cache, sequence);
  expect_nothing_left(cache, sequences);
}

TEST_P(FakeAuto, CopiesHoldNoMemoryThatRowsWithoutRoomNeed) {
  constexpr int64_t kBudget = 16 << 20;
  Config config = config_of(kBudget, GetParam());
  config.host_budget = 8 << 20;
  Cache cache(config);
  std::vector<SequenceId> sequences;
  for (int round = 0; round < 3; ++round) {
    try {
      for (;;) {
        ASSERT_LT(sequences.size(), 400u);
        sequences.push_back(cache.add());
        for (int64_t layer = 0; layer < kLayers; ++layer) prefill(cache, sequences.back(), layer);
        for (int i = 0; i < 20; ++i) decode(cache, sequences.back());
        test::finish_all();
      }
    } catch (const OutOfMemory&) {
      // All of both memories is in use: a copy that was made early is rows that have left by now.
      const Stats full = cache.stats();
      EXPECT_GE(full.memory.live, kBudget / 16 * 13);
      EXPECT_GE(full.offloaded_bytes, config.host_budget / 4 * 3);  // it comes in slabs of 2 MB
    }
    settle(cache);
    while (sequences.size() > 3) cache.remove(sequences.back()), sequences.pop_back();
    settle(cache);
  }
  EXPECT_EQ(test::wrong(), "");
}

/**
 * Short and long sequences come and go while both budgets are nearly full: as long as what cannot
 * leave the device has room there, and all of it in both, nothing is refused.
 */
TEST_P(FakeAuto, WhatFitsBothMemoriesIsNeverRefused) {
  constexpr int64_t kSegment = 64;
  Config config = config_of(16 << 20, GetParam());
  config.host_budget = 32 << 20;
  config.dense_below = 700;
  Config leaving = config;  // of which the device holds what cannot leave
  leaving.placement = Placement::kHost;
  const auto stays = [&](int64_t tokens) {
    return tokens * leaving.bytes_per_token(tokens).device +
           leaving.bytes_per_sequence(tokens, kSegment).device;
  };
  const auto rows = [&](int64_t tokens) {
    return (tokens + kSegment) * leaving.bytes_per_token(tokens).host;
  };
  const int64_t device = 13 << 20, both = device + (29 << 20);
  Cache cache(config);
  const Stats empty = cache.stats();
  std::vector<std::pair<SequenceId, int64_t>> live;
  int64_t held = 0, all = 0, most = 0, number = 0;
  const auto end = [&](size_t which) {
    cache.remove(live[which].first);
    held -= stays(live[which].second), all -= rows(live[which].second);
    live.erase(live.begin() + std::ptrdiff_t(which));
  };
  for (int i = 0; i < 150; ++i) {
    number = (number * 1103515245 + 12345) % (int64_t{1} << 31);
    const int64_t tokens = i % 3 == 0 ? 20 + number % 400 : 500 + number % 6000;
    while (held + stays(tokens) > device || held + all + stays(tokens) + rows(tokens) > both) {
      end(size_t(number) % live.size());
    }
    const SequenceId sequence = cache.add();
    for (int64_t left = tokens; left > 0; left -= kTokens) {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        ASSERT_NO_THROW(prefill(cache, sequence, layer, std::min(left, kTokens))) << i;
      }
    }
    live.push_back({sequence, tokens});
    held += stays(tokens), all += rows(tokens);
    most = std::max(most, cache.stats().offloaded_bytes);
  }
  EXPECT_GT(most, 4 << 20);
  while (!live.empty()) end(0);
  settle(cache);
  const Stats last = cache.stats();
  EXPECT_EQ(last.memory.live - last.workspace_bytes, empty.memory.live - empty.workspace_bytes);
  EXPECT_EQ(last.host_memory.live, 0);
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeAuto, OneSequenceGrowsBeyondTheBudget) {
  constexpr int64_t kBudget = 12 << 20;
  Cache cache(config_of(kBudget, GetParam()));
  const SequenceId sequence = add(cache);
  for (int i = 0; i < 40; ++i) {
    for (int64_t layer = 0; layer < kLayers; ++layer) prefill(cache, sequence, layer);
    decode(cache, sequence);
  }
  EXPECT_GT(cache.stats().offloaded_bytes, kBudget);
  EXPECT_EQ(test::wrong(), "");
}

INSTANTIATE_TEST_SUITE_P(All, FakeAuto, testing::Values(KVDType::kAuto, KVDType::kInt8));

}  // namespace

}  // namespace pariskv
