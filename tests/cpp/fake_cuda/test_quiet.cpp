// Steps of a batch that change nothing but lengths: what the device is told, and when no more.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {

namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kMost = 6000;

Config config_of(Placement placement = Placement::kHost) {
  Config config = test::small_config(kLayers, 2 * kHeads, kHeads, kDim);
  config.update = 24;
  config.placement = placement;
  std::get<ParisKV>(config.policy).top_k = 8;
  return config;
}

class FakeQuiet : public testing::Test {
 protected:
  FakeQuiet() { test::wrong().clear(); }
  ~FakeQuiet() override {
    test::finish_all();
    EXPECT_EQ(test::wrong(), "");
    test::wrong().clear();
  }

  TensorView view(std::vector<uint16_t>& numbers, int64_t tokens, int64_t group = 1) {
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, group * kHeads, kDim},
                                  {DeviceType::kCuda, test::kDevice});
  }
  /** Sequences of so many tokens each; rows have the number of their token. */
  std::vector<SequenceId> filled(Cache& cache, const std::vector<int64_t>& lengths) {
    std::vector<SequenceId> sequences;
    for (const int64_t tokens : lengths) {
      sequences.push_back(cache.add());
      prefill(cache, sequences.back(), tokens);
    }
    note(cache);
    return sequences;
  }
  void prefill(Cache& cache, SequenceId id, int64_t tokens) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const int64_t begin = cache.length(id, layer);
      for (int64_t t = 0; t < tokens; ++t) number(rows_, t, begin + t);
      cache.prefill(layer, {id}, {tokens}, view(rows_, tokens), view(rows_, tokens));
    }
  }
  void number(std::vector<uint16_t>& rows, int64_t row, int64_t value) {
    std::fill_n(rows.begin() + row * kHeads * kDim, kHeads * kDim, uint16_t(value));
  }
  void decode(Cache& cache, const Batch& batch, int64_t layer) {
    for (int64_t i = 0; i < batch.size(); ++i) {
      const SequenceId id = batch.ids()[size_t(i)];
      // Without a call on the cache: it would have its layers told.
      if (id != kIdle) number(rows_, i, lengths_[id][size_t(layer)]++);
    }
    cache.decode(layer, batch, view(q_, batch.size(), 2), view(rows_, batch.size()),
                 view(rows_, batch.size()), view(out_, batch.size(), 2));
  }
  void step(Cache& cache, const Batch& batch) {
    for (int64_t layer = 0; layer < kLayers; ++layer) decode(cache, batch, layer);
  }
  void note(Cache& cache) {
    lengths_.clear();
    for (const SequenceId id : cache.sequences()) {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        lengths_[id].push_back(cache.length(id, layer));
      }
    }
  }
  /** Every token has the row that it came with. */
  void check(Cache& cache) {
    for (const auto& [id, layers] : lengths_) {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        const int64_t tokens = cache.length(id, layer);
        ASSERT_EQ(tokens, layers[size_t(layer)]);
        cache.read(layer, id, 0, view(k_, tokens), view(v_, tokens));
        test::finish_all();
        for (int64_t t = 0; t < tokens; ++t) {
          ASSERT_EQ(k_[size_t(t * kHeads * kDim)], uint16_t(t)) << "sequence " << id;
          ASSERT_EQ(v_[size_t((t + 1) * kHeads * kDim - 1)], uint16_t(t)) << "sequence " << id;
        }
      }
    }
  }
  /** So many steps; tokens that the device counted, of those. */
  int64_t steps(Cache& cache, const Batch& batch, int64_t count) {
    const int64_t before = test::told().tokens;
    for (int64_t i = 0; i < count; ++i) step(cache, batch);
    return test::told().tokens - before;
  }

  std::vector<uint16_t> rows_ = std::vector<uint16_t>(kMost * kHeads * kDim);
  std::vector<uint16_t> k_ = rows_, v_ = rows_;
  std::vector<uint16_t> q_ = std::vector<uint16_t>(2 * 16 * kHeads * kDim);
  std::vector<uint16_t> out_ = q_;
  std::map<SequenceId, std::vector<int64_t>> lengths_;
};

TEST_F(FakeQuiet, StepsAreCountedByTheDevice) {
  Cache cache(config_of());
  const Batch batch = cache.batch(filled(cache, {100, 130, 300}));
  step(cache, batch);
  test::finish_all();
  step(cache, batch);  // rows of the prompts have arrived
  const test::Told before = test::told();
  for (int i = 0; i < 10; ++i) step(cache, batch);
  EXPECT_EQ(test::told().tokens - before.tokens, 10 * kLayers * 3);
  EXPECT_EQ(test::told().words, before.words);
  EXPECT_EQ(cache.stats().decode_tokens, 12 * kLayers * 3);
  check(cache);
}

TEST_F(FakeQuiet, OneSequenceThatFlushesIsPlannedAlone) {
  Cache cache(config_of());
  const Batch batch = cache.batch(filled(cache, {200, 200, 200, 200}));
  steps(cache, batch, 2);
  cache.flush({batch.ids()[0]});  // from now on it flushes at other times
  steps(cache, batch, 1);
  // Each sequence is planned when it flushes, once in 24 steps, and for a new segment, in 64.
  const int64_t counted = steps(cache, batch, 72), all = 72 * kLayers * 4;
  EXPECT_EQ(cache.stats().flushes, 4 * kLayers * (72 / 24));
  EXPECT_GE(counted, all * 9 / 10);
  EXPECT_LT(counted, all);
  check(cache);
}

TEST_F(FakeQuiet, AStepThatFailsChangesNothing) {
  Cache cache(config_of());
  const Batch batch = cache.batch(filled(cache, {100, 130, 300}));
  int64_t failed = 0;
  for (int64_t nth = 0; nth < 60; ++nth) {
    steps(cache, batch, 1 + nth % 3);
    const auto before = lengths_;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      try {
        const test::Faults faults(nth % 8);
        decode(cache, batch, layer);
      } catch (const CudaError&) {
        for (auto& [id, layers] : lengths_) layers[size_t(layer)] = before.at(id)[size_t(layer)];
        ++failed;
      }
    }
    if (nth % 2 == 0) check(cache);
  }
  EXPECT_GT(failed, 20);
  check(cache);
}

TEST_F(FakeQuiet, SequencesWhoseRowsLeftGetARowCache) {
  Config config = config_of(Placement::kAuto);
  config.memory_budget = 8 << 20;
  Cache cache(config);
  const Batch batch = cache.batch(filled(cache, {900, 500, 400, 400, 300, 300}));
  const auto there = [&] { return cache.stats().memory.reserved; };
  while (there() < config.memory_budget * 7 / 8) prefill(cache, batch.ids()[1], 100);
  note(cache);
  for (const SequenceId id : batch.ids()) {  // they flush one after the other
    cache.flush({id});
    steps(cache, batch, 3);
  }
  ASSERT_EQ(cache.stats().offloaded_bytes, 0);
  int64_t counted = 0, taken = 0;
  for (; cache.stats().offloaded_bytes == 0; ++taken) {  // mostly of others than grow
    ASSERT_LT(taken, 2000);
    counted += steps(cache, batch, 1);
  }
  counted += steps(cache, batch, 30);
  EXPECT_GT(counted, (taken + 30) * kLayers * 6 * 3 / 4);
  check(cache);
}

TEST_F(FakeQuiet, OtherCallsMayComeBetweenAnySteps) {
  Cache cache(config_of());
  const std::vector<SequenceId> ids = filled(cache, {100, 130, 300, 90});
  const Batch batch = cache.batch(ids);
  const std::vector<std::function<void()>> calls = {
      [&] { cache.truncate({ids[0]}, Cut::drop({7})); },
      [&] { cache.truncate({ids[2]}, Cut::drop({60})); },
      [&] { cache.remove(cache.fork(ids[1])); },
      [&] { cache.fork(ids[1]); },
      [&] { cache.reorder({ids[0], ids[3]}, {1, 0}); },
      [&] { cache.flush({ids[3]}); },
      [&] { cache.advance(batch), test::captured_stream() = nullptr, step(cache, batch); },
      [&] { decode(cache, {ids[2]}, 1); },
      [&] { step(cache, {ids[3], kIdle, ids[0]}); },
      [&] { cache.summaries(0, ids[2]); },
      [&] { cache.stats(); },
      [&] { cache.trim(); },
      [&] { cache.add(); },
      [&] { cache.decode(0, batch, view(q_, 4, 2), view(out_, 4, 2)); },
      [&] { prefill(cache, ids[1], 33); },
      [&] { cache.batch({ids[1]}); },
  };
  int64_t counted = 0;
  for (size_t call = 0; call < calls.size(); ++call) {
    for (const int64_t before : {1, 3, 11}) {
      SCOPED_TRACE(call);
      counted += steps(cache, batch, before);
      calls[call]();
      test::captured_stream() = test::kCapturedStream;
      note(cache);
      counted += steps(cache, batch, 5);
      check(cache);
      ASSERT_EQ(test::wrong(), "");
    }
  }
  EXPECT_GT(counted, 0);
}

}  // namespace

}  // namespace pariskv
