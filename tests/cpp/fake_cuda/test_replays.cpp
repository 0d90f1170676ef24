// Replays of recorded steps: the library sees none of them, and they run at their own time.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {
namespace {

constexpr int64_t kHeads = 2, kDim = 64, kPrompt = 300;

Config config_of(ZoneRows rows) {
  Config config = test::small_config(1, 2 * kHeads, kHeads, kDim);
  HardKV policy;
  policy.most = 120;  // some of them in segments behind the first
  policy.placement = rows;
  config.policy = policy;
  config.placement = rows == ZoneRows::kDropped ? Placement::kDevice : Placement::kHost;
  return config;
}

/** Nothing is done, and no event passes, unless somebody waits for it. */
class FakeReplays : public testing::Test {
 protected:
  FakeReplays() {
    test::wrong().clear();
    test::callers_work_late() = true;
    test::fault_switches().nothing_by_chance = true;
  }
  ~FakeReplays() override {
    test::finish_all();
    EXPECT_EQ(test::wrong(), "");
    test::callers_work_late() = false;
    test::fault_switches() = {};
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(other_), cudaSuccess);
    test::wrong().clear();
  }

  static TensorView view(std::vector<uint16_t>& numbers, int64_t tokens, int64_t heads) {
    numbers.resize(std::max(numbers.size(), size_t(tokens * heads * kDim)));
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, heads, kDim},
                                  {DeviceType::kCuda, test::kDevice});
  }
  SequenceId filled(Cache& cache) {
    k_.assign(size_t(kPrompt * kHeads * kDim), 7);
    const SequenceId sequence = cache.add();
    PrefillOptions options;
    options.q = view(q_, kPrompt, 2 * kHeads);
    cache.prefill(0, {sequence}, {kPrompt}, view(k_, kPrompt, kHeads), view(k_, kPrompt, kHeads),
                  options, {stream_});
    return sequence;
  }
  void decode(Cache& cache, SequenceId sequence, cudaStream_t stream) {
    cache.decode(0, {sequence}, view(q_, 1, 2 * kHeads), view(k_, 1, kHeads), view(k_, 1, kHeads),
                 view(out_, 1, 2 * kHeads), {}, {stream});
  }
  void replay(Cache& cache, SequenceId sequence) {
    test::captured_stream() = stream_;
    decode(cache, sequence, stream_);
    test::captured_stream() = test::kCapturedStream;
  }

  const cudaStream_t stream_ = test::make_stream(), other_ = test::make_stream();

 private:
  std::vector<uint16_t> k_, q_, out_;
};

TEST_F(FakeReplays, FindNoRowsThatWereGivenBackForThem) {
  Cache cache(config_of(ZoneRows::kDropped));
  const SequenceId sequence = filled(cache);
  cache.advance({sequence}, {stream_});
  ASSERT_GT(cache.regions(sequence, 0).dropped, 0);
  // Their memory is another's before the replay runs: for one it is zeroed.
  test::finish_all();
  cache.flush(std::vector<SequenceId>{}, {stream_});
  test::finish_all();
  replay(cache, sequence);
  test::finish_all();
  EXPECT_EQ(test::wrong(), "");
}

TEST_F(FakeReplays, ComeBeforeLaterCallsWhateverFails) {
  int64_t failed = 0;
  for (int64_t nth = 0;; ++nth) {
    ASSERT_LT(nth, 200);
    Cache cache(config_of(ZoneRows::kHost));
    const SequenceId sequence = filled(cache);
    cache.advance({sequence}, {stream_});
    bool replayed = false;
    test::enqueue(stream_, [&] { replayed = true; });
    const test::Faults faults(nth);
    bool refused = false;
    try {
      decode(cache, sequence, other_);
    } catch (const OutOfMemory&) {
      refused = true;
    } catch (const CudaError&) {
      refused = true;
    }
    failed += refused;
    test::finish(other_);
    if (!refused) {
      EXPECT_TRUE(replayed) << "call " << nth << " was refused";
    }
    test::finish_all();
    if (!faults.met()) break;
  }
  EXPECT_GT(failed, 5);
}

}  // namespace
}  // namespace pariskv
