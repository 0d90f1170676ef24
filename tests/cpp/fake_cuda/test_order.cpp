// What calls wait for, on streams that come and go.
#include <gtest/gtest.h>

#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {
namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kPrompt = 300;

class FakeOrder : public testing::Test {
 protected:
  FakeOrder() : cache(test::small_config(kLayers, kHeads, kHeads, kDim)), sequence(cache.add()) {
    test::wrong().clear();
  }
  ~FakeOrder() override {
    EXPECT_EQ(test::wrong(), "");
    EXPECT_EQ(test::current_device(), 0) << "the caller had another device";
    test::fault_switches() = {};
    test::callers_work_late() = false;
  }

  void prefill(SequenceId whose, int64_t layer, cudaStream_t stream) {
    const TensorView rows = view(kPrompt);
    cache.prefill(layer, {whose}, {kPrompt}, rows, rows, {}, {stream});
  }
  void prefill(int64_t layer, cudaStream_t stream) { prefill(sequence, layer, stream); }
  void prefill(cudaStream_t stream) {
    for (int64_t layer = 0; layer < kLayers; ++layer) prefill(layer, stream);
  }
  void decode(cudaStream_t stream) {
    const TensorView row = view(1);
    cache.decode(0, {sequence}, row, row, row, view(out_, 1), {}, {stream});
  }
  /** How often streams wait for others in it, once there is nothing to catch up with. */
  template <typename Act>
  int64_t waits_in(Act act) {
    const int64_t before = test::times_held_back();
    act();
    return test::times_held_back() - before;
  }

  Cache cache;
  const SequenceId sequence;

 private:
  TensorView view(std::vector<uint16_t>& numbers, int64_t tokens) {
    numbers.resize(size_t(tokens * kHeads * kDim));
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, kHeads, kDim},
                                  cache.config().device);
  }
  TensorView view(int64_t tokens) { return view(numbers_, tokens); }
  std::vector<uint16_t> numbers_, out_;
};

TEST_F(FakeOrder, ReusedStreamHandleIsANewStream) {
  const cudaStream_t first = test::make_stream();
  prefill(0, first);
  for (int i = 0; i < 20; ++i) decode(first);
  EXPECT_EQ(waits_in([&] { decode(first); }), 0) << "in the order of one stream";
  ASSERT_EQ(cudaStreamDestroy(first), cudaSuccess);
  const cudaStream_t second = test::make_stream();
  ASSERT_EQ(first, second) << "the fake should have given the handle to another stream";
  EXPECT_EQ(waits_in([&] { decode(second); }), 1) << "for the call on the stream that has gone";
  ASSERT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

TEST_F(FakeOrder, DestroyedStreamIsNotUsed) {
  const cudaStream_t stream = test::make_stream();
  prefill(0, stream);
  for (int i = 0; i < 3; ++i) decode(stream);
  cache.remove(sequence, {stream});
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  cache.trim();
  cache.stats();
  EXPECT_EQ(cache.stats().row_bytes, 0);
}

TEST_F(FakeOrder, StreamMayBeDestroyedAfterTheNextAdvance) {
  const cudaStream_t first = test::make_stream();
  prefill(nullptr);
  cache.advance({sequence}, {first});
  cache.advance({sequence}, {nullptr});
  ASSERT_EQ(cudaStreamDestroy(first), cudaSuccess);
  decode(nullptr);
  cache.flush({sequence});
}

TEST_F(FakeOrder, ReplayComesAfterEarlierCalls) {
  test::callers_work_late() = true;
  test::fault_switches().nothing_by_chance = true;
  const cudaStream_t replays = test::make_stream(), other = test::make_stream();
  prefill(replays);
  cache.advance({sequence}, {replays});
  test::finish_all();
  cache.remove(cache.fork(sequence, {other}), {other});
  EXPECT_GT(test::work_under_way(), 0);
  test::finish(replays);  // as a replay would
  EXPECT_EQ(test::work_under_way(), 0);
  ASSERT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(FakeOrder, CapturingStreamHasNoPartInTheOrder) {
  const cudaStream_t replays = test::make_stream();
  prefill(replays);
  cache.advance({sequence}, {replays});
  for (int i = 0; i < 20; ++i) cache.flush({sequence}, {nullptr});
  EXPECT_EQ(waits_in([&] { cache.flush({sequence}, {nullptr}); }), 2) << "before it and after";
  test::captured_stream() = replays;
  EXPECT_EQ(waits_in([&] { cache.flush({sequence}, {nullptr}); }), 0);
  test::captured_stream() = test::kCapturedStream;
}

TEST_F(FakeOrder, FreedBlocksAreReused) {
  int64_t at_first = 0;
  for (int i = 0; i < 400; ++i) {
    const SequenceId another = cache.add();
    prefill(another, 0, nullptr);
    cache.remove(another, {nullptr});
    if (i == 40) at_first = cache.stats().memory.reserved;
  }
  EXPECT_LT(cache.stats().memory.reserved, 2 * at_first);
}

TEST_F(FakeOrder, TrimReturnsRetiredBlocks) {
  test::fault_switches().nothing_by_chance = true;
  prefill(nullptr);
  cache.remove(sequence, {nullptr});
  EXPECT_GT(cache.stats().host_memory.reserved, 0);
  cache.trim();
  EXPECT_EQ(cache.stats().host_memory.reserved, 0);
}

TEST_F(FakeOrder, PrefillDoesNotWaitForOffloads) {
  // Slabs of every size are there: new ones are zeroed, which is work as well.
  const SequenceId another = cache.add();
  for (int64_t layer = 0; layer < kLayers; ++layer) prefill(another, layer, nullptr);
  test::finish_all();
  // Nothing is done, and no event passes, unless somebody waits for it.
  test::fault_switches().nothing_by_chance = true;
  const auto under_way = [&](int64_t layer) {
    const int64_t before = test::work_under_way();
    prefill(layer, nullptr);
    return test::work_under_way() - before;
  };
  const int64_t first = under_way(0);
  EXPECT_GE(first, 1) << "segments that leave, all with one launch or each with a copy";
  EXPECT_EQ(under_way(1), first) << "the second layer's as well, beside those of the first";
  test::fault_switches().nothing_by_chance = false;
  for (int i = 0; i < 2; ++i) test::finish_all(), cache.flush(std::vector<SequenceId>{});
  const int64_t segment = 64 * kHeads * 2 * kDim * int64_t(sizeof(uint16_t));
  EXPECT_GE(cache.stats().offloaded_bytes, 2 * kLayers * 3 * segment) << "of both sequences";
}

TEST_F(FakeOrder, CallWithoutEndEventIsWaitedFor) {
  prefill(0, nullptr);
  for (int64_t nth = 0; nth < 40; ++nth) {
    const test::Faults faults(nth);
    try {
      decode(nullptr);  // marking its end is one of the calls that are refused in turn
    } catch (const CudaError&) {
    } catch (const OutOfMemory&) {
    }
  }
  const int64_t length = cache.length(sequence, 0);
  EXPECT_GE(length, kPrompt);
  decode(nullptr);
  EXPECT_EQ(cache.length(sequence, 0), length + 1);
}

/** Every call that making a cache makes is refused once. */
TEST(FakeCudaBirth, MayFailAnywhere) {
  int64_t failures = 0;
  for (int64_t nth = 0;; ++nth) {
    ASSERT_LT(nth, 100);
    const test::Faults faults(nth);
    try {
      Cache cache(test::small_config(kLayers, kHeads, kHeads, kDim));
      if (!faults.met()) break;
    } catch (const OutOfMemory&) {
      ++failures;
    } catch (const CudaError&) {
      ++failures;
    }
  }
  EXPECT_GT(failures, 5);
  EXPECT_EQ(test::wrong(), "");
}

TEST(FakeCudaBirth, NeedsADeviceThatThereIsCodeFor) {
  EXPECT_TRUE(is_available(DeviceType::kCuda)) << "one of the two will do";
  Config config = test::small_config(kLayers, kHeads, kHeads, kDim);
  config.device.index = 0;
  try {
    Cache cache(config);
    FAIL() << "there is no code for it";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "[config] device: expected a GPU that this build has code for (compute "
                 "capability 8.0 and newer), got cuda:0 with 7.5");
  }
}

}  // namespace
}  // namespace pariskv
