// What a flush leaves to be done is done beside later steps: none of it in a heap, none of it
// never.
#include <gtest/gtest.h>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {
namespace {

constexpr int64_t kLayers = 4, kHeads = 2, kDim = 64, kPrompt = 600;

Config config_of() {
  Config config = test::small_config(kLayers, kHeads, kHeads, kDim);
  config.sink = 0;
  config.update = 128;
  return config;
}

/** One sequence that decodes call by call, or as a replayed graph would. */
class Walk {
 public:
  Walk()
      : cache(config_of()),
        sequence(cache.add()),
        numbers_(kPrompt * kHeads * kDim),
        out_(kHeads * kDim) {
    const TensorView rows = view(numbers_, kPrompt);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      cache.prefill(layer, {sequence}, {kPrompt}, rows, rows);
    }
  }
  void step(bool graph) {
    if (graph) cache.advance({sequence});
    const Stream stream{graph ? const_cast<CUstream_st*>(test::kCapturedStream) : nullptr};
    const TensorView row = view(numbers_, 1);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      cache.decode(layer, {sequence}, row, row, row, view(out_, 1), {}, stream);
    }
  }
  int64_t bytes_to_leave() {
    const RegionCounts regions = cache.regions(sequence);
    return kLayers * ((regions.sink + regions.retrieval) / 64) * 64 * kHeads * 2 * kDim * 2;
  }
  int64_t bytes_away() { return cache.stats().offloaded_bytes; }

  Cache cache;
  const SequenceId sequence;

 private:
  TensorView view(std::vector<uint16_t>& numbers, int64_t tokens) {
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, kHeads, kDim},
                                  cache.config().device);
  }
  std::vector<uint16_t> numbers_, out_;
};

class FakeCudaPace : public testing::TestWithParam<bool> {};

TEST_P(FakeCudaPace, StepsTakeNoPinnedMemoryThemselves) {
  Walk walk;
  walk.step(GetParam());
  const int64_t before = test::pinned_by_me();
  const int64_t reserved = walk.cache.stats().host_memory.reserved;
  for (int i = 0; i < 2000; ++i) walk.step(GetParam());
  EXPECT_EQ(test::pinned_by_me(), before);
  EXPECT_GT(walk.cache.stats().host_memory.reserved, reserved) << "none was needed";
  EXPECT_EQ(test::wrong(), "");
}

TEST_P(FakeCudaPace, RowsLeaveAFewAtATimeAndAllOfThem) {
  Walk walk;
  int64_t before = walk.bytes_away(), most = 0;
  const int64_t segment = walk.bytes_to_leave() / (kPrompt / 64) / kLayers;
  for (int i = 0; i < 1000; ++i) {
    walk.step(GetParam());
    const int64_t now = walk.bytes_away();
    if (i > 20) most = std::max(most, now - before);  // a prefill's rows go all at once
    before = now;
    // 4 layers by 2 segments have left a flush: they are gone long before the next.
    const int64_t since = walk.cache.regions(walk.sequence).buffer;
    if (since >= 64) EXPECT_EQ(now, walk.bytes_to_leave()) << i;
  }
  EXPECT_GT(most, 0);
  EXPECT_LE(most, (GetParam() ? 1 : kLayers) * segment);
}

TEST_P(FakeCudaPace, FlushCallSendsAllRows) {
  Walk walk;
  while (walk.cache.regions(walk.sequence).buffer != 0) walk.step(GetParam());
  for (int i = 0; i < 128; ++i) walk.step(GetParam());
  ASSERT_EQ(walk.cache.regions(walk.sequence).buffer, 0);
  for (int i = 0; i < 50; ++i) walk.cache.flush({});  // events of the fake pass late
  EXPECT_EQ(walk.bytes_away(), walk.bytes_to_leave());
}

INSTANTIATE_TEST_SUITE_P(All, FakeCudaPace, testing::Bool());

}  // namespace
}  // namespace pariskv
