// Slots of a batch: their scratch follows the sequences that are there, not the longest ever.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"
#include "slot_table.h"

namespace pariskv {
namespace {

constexpr int64_t kHeads = 2, kDim = 64, kLayers = 2, kLong = 9000, kShort = 300;

class FakeSlots : public testing::Test {
 protected:
  FakeSlots() : cache_(test::small_config(kLayers, kHeads, kHeads, kDim)) {
    test::wrong().clear();
    test::callers_work_late() = true;
  }
  ~FakeSlots() override {
    test::finish_all();
    EXPECT_EQ(test::wrong(), "");
    test::callers_work_late() = false;
    cuda::kept_scratch_bytes() = kept_;
  }

  SequenceId filled(int64_t tokens) {
    const SequenceId sequence = cache_.add();
    for (int64_t layer = 0; layer < kLayers; ++layer) grow(layer, sequence, tokens);
    return sequence;
  }
  void grow(int64_t layer, SequenceId sequence, int64_t tokens) {
    cache_.prefill(layer, {sequence}, {tokens}, rows(tokens), rows(tokens), {}, {stream_});
  }
  /** Bytes of scratch after a step of these, which is replayed, or decoded layer by layer. */
  int64_t after_step(const std::vector<SequenceId>& sequences, bool replayed) {
    if (replayed) cache_.advance(sequences, {stream_});
    return step(sequences, replayed);
  }
  int64_t after_replay(const std::vector<SequenceId>& sequences) { return step(sequences, true); }

  /** The last number of a sequence's last row. */
  int64_t last_number(SequenceId sequence) {
    cache_.read(0, sequence, cache_.length(sequence) - 1, rows(1, out_), rows(1, read_), {stream_});
    test::finish_all();
    return out_[kHeads * kDim - 1];
  }
  /** What steps bring from now on. */
  void bring(uint16_t number) {
    test::finish_all();
    std::fill(numbers_.begin(), numbers_.end(), number);
  }

  const cudaStream_t stream_ = test::make_stream();
  Cache cache_;

 private:
  int64_t step(const std::vector<SequenceId>& sequences, bool replayed) {
    // Replays are on the stream that `advance` was given, so they run before what follows.
    if (replayed) test::captured_stream() = stream_;
    const TensorView row = rows(int64_t(sequences.size()));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      cache_.decode(layer, sequences, row, row, row, rows(row.shape[0], out_), {}, {stream_});
    }
    test::captured_stream() = test::kCapturedStream;
    return cache_.stats().workspace_bytes;
  }
  TensorView rows(int64_t tokens) { return rows(tokens, numbers_); }
  static TensorView rows(int64_t tokens, std::vector<uint16_t>& numbers) {
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, kHeads, kDim},
                                  {DeviceType::kCuda, test::kDevice});
  }
  std::vector<uint16_t> numbers_ = std::vector<uint16_t>(kLong * kHeads * kDim), out_ = numbers_;
  std::vector<uint16_t> read_ = std::vector<uint16_t>(kHeads * kDim);
  const int64_t kept_ = cuda::kept_scratch_bytes();
};

TEST_F(FakeSlots, KeepWhatTheyHaveWhileItIsLittle) {
  const SequenceId large = filled(kLong), small = filled(kShort);
  const int64_t one = after_step({large, kIdle}, true), both = after_step({small, large}, true);
  EXPECT_EQ(both, 2 * one);
  EXPECT_EQ(after_step({kIdle, small}, true), both);
  EXPECT_EQ(after_step({small}, false), both);
}

TEST_F(FakeSlots, GiveBackWhatNoSequenceNeedsWhereOneTakesMore) {
  const SequenceId large = filled(kLong), small = filled(kShort);
  const int64_t little = after_step({small}, true), both = after_step({large, small}, true);
  cuda::kept_scratch_bytes() = both - 1;
  EXPECT_EQ(after_step({large, small}, true), both) << "all of it is needed";
  EXPECT_EQ(after_step({small}, false), both) << "none is needed: the next may need it again";
  EXPECT_EQ(after_step({small, large}, true), both) << "the first was for a longer one";
  EXPECT_EQ(after_step({kIdle, kIdle, small}, true), little);
  EXPECT_EQ(after_step({kIdle, large, small}, false), both);
}

TEST_F(FakeSlots, AreIdleInAReplayForWhichNobodyIsNamed) {
  const SequenceId sequence = filled(kShort);
  for (const bool replayed : {false, true}) {
    bring(5);
    after_step({sequence}, replayed);
    cache_.advance({}, {stream_});
    bring(9);
    after_replay({kIdle});
    EXPECT_EQ(last_number(sequence), 5);
  }
}

TEST_F(FakeSlots, HaveEnoughForEachLayerOfASequence) {
  cuda::kept_scratch_bytes() = 0;
  const SequenceId sequence = filled(kShort), other = filled(kShort), third = filled(kLong);
  grow(0, sequence, kLong);
  const int64_t large = after_step({sequence}, true);
  EXPECT_EQ(after_step({sequence, third}, true), 2 * large);
  EXPECT_LT(after_step({other, kIdle, third}, true), 2 * large);
  EXPECT_EQ(after_step({sequence, kIdle, third}, false), 2 * large);
  EXPECT_EQ(after_step({sequence, kIdle, third}, true), 2 * large);
}

TEST_F(FakeSlots, HaveEnoughWhoeverComes) {
  cuda::kept_scratch_bytes() = 0;
  const std::vector<SequenceId> all = {filled(kLong), filled(kShort), filled(kLong / 2),
                                       filled(2 * kShort)};
  std::srand(3);
  for (int step = 0; step < 200; ++step) {
    std::vector<SequenceId> batch;
    for (const SequenceId sequence : all) {
      if (std::rand() % 2 == 0) batch.push_back(sequence);
    }
    for (size_t i = batch.size(); i > 1; --i) std::swap(batch[i - 1], batch[size_t(rand()) % i]);
    const bool replayed = std::rand() % 2 == 0;
    if (batch.empty()) continue;
    while (replayed && batch.size() < all.size()) {
      batch.insert(batch.begin() + std::rand() % int(batch.size() + 1), kIdle);
    }
    after_step(batch, replayed);
    test::finish_all();
    ASSERT_EQ(test::wrong(), "") << "step " << step;
  }
}

}  // namespace
}  // namespace pariskv
