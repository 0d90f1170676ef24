// Long lives of caches on the fake device: whatever is called in whatever order, on whatever
// stream, and however often memory runs out, every sequence has the rows that it was given.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {
namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kMost = 400;

class Life {
 public:
  explicit Life(int seed) : random_(uint32_t(seed)), cache_(config_of(seed)) {
    std::srand(unsigned(seed));
  }

  void step() {
    try {
      act();
    } catch (const OutOfMemory&) {
      ++refused_;
    }
    for (const auto& [sequence, layers] : truth_) {
      if (chance(4)) check(sequence);
    }
  }

  int64_t refused() const { return refused_; }

 private:
  using Numbers = std::vector<uint16_t>;  // one for each token, in all of its row

  static Config config_of(int seed) {
    Config config = test::small_config(kLayers, 2 * kHeads, kHeads, kDim);
    config.sink = 3;
    if (seed % 5 == 0) config.local = 0;
    config.update = 24;
    config.top_k = 8;
    config.dense_below = 64;
    if (seed % 8 == 2) config.row_cache = 0;
    if (seed % 8 == 3) config.row_cache = 100;
    if (seed % 4 == 1) config.placement = Placement::kDevice;
    if (seed % 3 == 0) config.memory_budget = (6 << 20) + seed * 50'000;
    if (seed % 7 == 0) config.host_budget = 2 << 20;
    return config;
  }

  int64_t below(int64_t count) { return int64_t(random_() % uint64_t(count)); }
  bool chance(int64_t of) { return below(of) == 0; }
  Stream stream() { return {reinterpret_cast<void*>(intptr_t(below(3)))}; }
  TensorView view(Numbers& data, int64_t tokens, int64_t heads) {
    data.resize(size_t(std::max(tokens, int64_t{1}) * heads * kDim));
    return TensorView::contiguous(data.data(), DType::kFloat16, {tokens, heads, kDim},
                                  cache_.config().device);
  }
  /** Rows of so many new tokens, each with a number of its own; V has its complement. */
  Numbers new_rows(int64_t tokens) {
    Numbers numbers;
    view(k_, tokens, kHeads);
    view(v_, tokens, kHeads);
    for (int64_t t = 0; t < tokens; ++t) {
      numbers.push_back(next_++);
      std::fill_n(k_.begin() + t * kHeads * kDim, kHeads * kDim, numbers.back());
      std::fill_n(v_.begin() + t * kHeads * kDim, kHeads * kDim, uint16_t(~numbers.back()));
    }
    return numbers;
  }
  static void append(Numbers& to, const Numbers& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  void check(SequenceId sequence) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const Numbers& expected = truth_[sequence][size_t(layer)];
      const int64_t tokens = int64_t(expected.size());
      ASSERT_EQ(cache_.length(sequence, layer), tokens);
      Numbers k, v;
      cache_.read(layer, sequence, 0, view(k, tokens, kHeads), view(v, tokens, kHeads), stream());
      for (int64_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(k[size_t(t * kHeads * kDim)], expected[size_t(t)]) << t;
        ASSERT_EQ(v[size_t((t + 1) * kHeads * kDim - 1)], uint16_t(~expected[size_t(t)])) << t;
      }
    }
  }

  void prefill(SequenceId sequence) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const int64_t tokens = 1 + below(kMost);
      const Numbers numbers = new_rows(tokens);
      cache_.prefill(layer, {sequence}, {tokens}, view(k_, tokens, kHeads),
                     view(v_, tokens, kHeads), stream());
      append(truth_[sequence][size_t(layer)], numbers);
    }
  }

  void decode(const std::vector<SequenceId>& batch, Stream on) {
    const int64_t count = int64_t(batch.size());
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const Numbers numbers = new_rows(count);
      cache_.decode(layer, batch, view(q_, count, 2 * kHeads), view(k_, count, kHeads),
                    view(v_, count, kHeads), view(out_, count, 2 * kHeads), {}, on);
      for (size_t i = 0; i < batch.size(); ++i) {
        truth_[batch[i]][size_t(layer)].push_back(numbers[i]);
      }
    }
  }

  void truncate(SequenceId sequence) {
    int64_t least = kMost;
    for (const Numbers& layer : truth_[sequence]) least = std::min(least, int64_t(layer.size()));
    const int64_t tokens = below(1 + (chance(2) ? least : std::min(least, int64_t{40})));
    cache_.truncate(sequence, tokens, stream());
    for (Numbers& layer : truth_[sequence]) layer.resize(layer.size() - size_t(tokens));
  }

  void act() {
    std::vector<SequenceId> all;
    for (const auto& [sequence, layers] : truth_) all.push_back(sequence);
    if (all.size() < 2) return void(truth_[cache_.add()].resize(size_t(kLayers)));
    const SequenceId one = all[size_t(below(int64_t(all.size())))];
    std::vector<SequenceId> batch = all;
    // Few together, or so many that they go in branches.
    batch.resize(std::min(batch.size(), size_t(chance(3) ? 12 : 3)));
    switch (below(12)) {
      case 0:
        if (all.size() < 12) truth_[cache_.add()].resize(size_t(kLayers));
        return;
      case 1:
        cache_.remove(one, stream());
        truth_.erase(one);
        return;
      case 2:
        if (all.size() < 12) {
          const SequenceId twin = cache_.fork(one, stream());
          truth_[twin] = truth_[one];
        }
        return;
      case 3:
        return prefill(one);
      case 4:
        return truncate(one);
      case 5:
        return cache_.flush(all, stream());
      case 6:
        cache_.reorder({all[0], all[1]}, {1, 1}, stream());
        truth_[all[0]] = truth_[all[1]];
        return;
      case 7:
        cache_.stats();
        cache_.summaries(0, one);
        if (chance(4)) cache_.trim();
        return;
      case 8:  // a graph's way: room is made, then recorded decodes run
        if (cache_.config().local == 0) return;
        cache_.advance(batch, stream());
        return decode(batch, {const_cast<CUstream_st*>(test::kCapturedStream)});
      default:
        return decode(batch, stream());
    }
  }

  std::mt19937 random_;
  Cache cache_;
  std::map<SequenceId, std::vector<Numbers>> truth_;
  Numbers k_, v_, q_, out_;
  uint16_t next_ = 1;
  int64_t refused_ = 0;
};

TEST(FakeCuda, EverySequenceKeepsItsRows) {
  int64_t refused = 0;
  for (int seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Life life(seed);
    for (int i = 0; i < 250; ++i) {
      life.step();
      ASSERT_EQ(test::wrong(), "");
      if (testing::Test::HasFatalFailure()) return;
    }
    refused += life.refused();
  }
  EXPECT_GT(refused, 0) << "memory was never short";
}

}  // namespace
}  // namespace pariskv
