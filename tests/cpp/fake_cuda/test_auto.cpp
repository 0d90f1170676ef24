// Rows that leave a GPU only when there is no room: what is given fits, and comes back as it was.
#include <gtest/gtest.h>

#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"

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
  void prefill(Cache& cache, SequenceId sequence, int64_t layer) {
    const TensorView rows = view(numbers_, kTokens);
    cache.prefill(layer, {sequence}, {kTokens}, rows, rows);
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

TEST_P(FakeAuto, OfFewSequencesLongerOnesAreAttendedToInFull) {
  Config config = config_of(0, GetParam());
  config.dense_below = ParisKV::kRegions.dense_below_on_gpu;
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
  const int64_t alone = GetParam() == KVDType::kInt8 ? kLayers : 0;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(searched(), alone);
  while (batch.size() < 17) batch.push_back(cache.add());  // 34 heads
  for (int i = 0; i < 3; ++i) EXPECT_EQ(searched(), kLayers);
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
    for (int i = 0; i < 2; ++i) {
      test::finish_all();
      cache.flush({});
    }
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
  for (const SequenceId sequence : sequences) cache.remove(sequence);
  test::finish_all();
  cache.flush(std::vector<SequenceId>{});
  EXPECT_EQ(cache.stats().offloaded_bytes, 0);
  EXPECT_EQ(test::wrong(), "");
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
