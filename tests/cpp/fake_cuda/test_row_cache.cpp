// Who has a row cache, and since when: told from the memory that a twin without one does not take.
#include <gtest/gtest.h>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {
namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kSlots = 4096;
/** Of all layers of a sequence: rows, tags, stamps. */
constexpr int64_t kBytes = kLayers * kHeads * kSlots * (2 * kDim * 2 + 8 + 4);

Config config_of(int64_t row_cache) {
  Config config = test::small_config(kLayers, 2 * kHeads, kHeads, kDim);
  config.sink = 3;
  config.update = 24;
  std::get<ParisKV>(config.policy).top_k = 8;
  config.dense_below = 100;
  config.row_cache = row_cache;
  return config;
}

class Driver {
 public:
  explicit Driver(const Config& config) : cache(config) {}

  void prefill(SequenceId sequence, int64_t tokens) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      cache.prefill(layer, {sequence}, {tokens}, view(k_, tokens, kHeads),
                    view(v_, tokens, kHeads));
    }
  }
  void decode(SequenceId sequence) {
    for (int64_t layer = 0; layer < kLayers; ++layer) decode(sequence, layer);
  }
  void decode(SequenceId sequence, int64_t layer) {
    cache.decode(layer, {sequence}, view(q_, 1, 2 * kHeads), view(k_, 1, kHeads),
                 view(v_, 1, kHeads), view(out_, 1, 2 * kHeads));
  }
  /** When all that was freed has been recycled. */
  int64_t live() {
    for (int i = 0; i < 20; ++i) cache.flush({});
    return cache.stats().memory.live;
  }

  Cache cache;

 private:
  TensorView view(std::vector<uint16_t>& data, int64_t tokens, int64_t heads) {
    data.resize(size_t(tokens * heads * kDim));
    return TensorView::contiguous(data.data(), DType::kFloat16, {tokens, heads, kDim},
                                  cache.config().device);
  }
  std::vector<uint16_t> q_, k_, v_, out_;
};

TEST(FakeRowCache, IsAllocatedByTheFirstSearchAndFreedWithItsSequence) {
  Driver with(config_of(kSlots)), without(config_of(0));
  const auto both = [&](auto act) { act(with), act(without); };
  const auto more = [&] { return with.live() - without.live(); };
  SequenceId one = -1, two = -1;
  both([&](Driver& driver) {
    one = driver.cache.add();
    driver.prefill(one, 98);
    driver.decode(one);
  });
  EXPECT_EQ(more(), 0) << "attended to in full";
  both([&](Driver& driver) { driver.decode(one); });
  EXPECT_EQ(more(), kBytes);
  both([&](Driver& driver) { two = driver.cache.fork(one); });
  EXPECT_EQ(more(), kBytes) << "a fork has none";
  both([&](Driver& driver) { driver.prefill(two, 50); });
  EXPECT_EQ(more(), kBytes) << "nor one that only grows";
  both([&](Driver& driver) { driver.cache.advance({two}); });
  EXPECT_EQ(more(), 2 * kBytes);
  both([&](Driver& driver) { driver.cache.truncate({two}, Cut::drop({100})); });
  EXPECT_EQ(more(), 2 * kBytes);
  both([&](Driver& driver) { driver.cache.reorder({one, two}, {1, 1}); });
  EXPECT_EQ(more(), kBytes);
  both([&](Driver& driver) { driver.cache.remove(one); });
  both([&](Driver& driver) { driver.cache.remove(two); });
  EXPECT_EQ(more(), 0);
  EXPECT_EQ(test::wrong(), "");
}

TEST(FakeRowCache, IsForRowsThatComeOverTheBus) {
  for (const Placement placement : {Placement::kHost, Placement::kDevice}) {
    Config config = config_of(kSlots);
    config.placement = placement;
    Driver with(config);
    config.row_cache = 0;
    Driver without(config);
    for (Driver* driver : {&with, &without}) {
      const SequenceId sequence = driver->cache.add();
      driver->prefill(sequence, 300);
      driver->decode(sequence);
    }
    EXPECT_EQ(with.live() - without.live(), placement == Placement::kHost ? kBytes : 0);
  }
}

TEST(FakeRowCache, ChangesNothingWhenItIsRefused) {
  Config config = config_of(1 << 20);
  config.memory_budget = 32 << 20;
  Driver driver(config);
  const SequenceId sequence = driver.cache.add();
  driver.prefill(sequence, 98);
  driver.decode(sequence);
  const int64_t live = driver.live();
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(driver.decode(sequence, 1), OutOfMemory);
    EXPECT_THROW(driver.cache.advance({sequence}), OutOfMemory);
    EXPECT_EQ(driver.cache.length(sequence), 99);
    EXPECT_EQ(driver.live(), live);
  }
  driver.prefill(sequence, 30);
  driver.cache.truncate({sequence}, Cut::drop({31}));
  driver.decode(sequence);
  EXPECT_EQ(driver.cache.length(sequence), 99);
  EXPECT_EQ(test::wrong(), "");
}

}  // namespace
}  // namespace pariskv
