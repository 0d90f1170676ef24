// Rows as pages that other kernels read: their numbers, their table, and who attends to whom.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fake.h"
#include "pariskv/pariskv.h"

namespace pariskv {

namespace {

constexpr int64_t kLayers = 2, kHeads = 2, kDim = 64, kSegment = 64, kMost = 3000;

class FakePages : public testing::Test {
 protected:
  FakePages() { test::wrong().clear(); }
  ~FakePages() override {
    test::finish_all();
    EXPECT_EQ(test::wrong(), "");
    test::wrong().clear();
  }

  static Config config_of(int64_t dense_below = 500) {
    Config config = test::small_config(kLayers, 2 * kHeads, kHeads, kDim);
    config.placement = Placement::kAuto;
    config.dense_below = dense_below;
    config.update = 24;
    std::get<ParisKV>(config.policy).top_k = 8;
    return config;
  }
  TensorView view(std::vector<uint16_t>& numbers, int64_t tokens, int64_t group = 1) {
    return TensorView::contiguous(numbers.data(), DType::kFloat16, {tokens, group * kHeads, kDim},
                                  {DeviceType::kCuda, test::kDevice});
  }
  /** Rows of tokens get 1,000 times `layer` plus their position. */
  void number(int64_t row, int64_t layer, int64_t position) {
    std::fill_n(rows_.begin() + row * kHeads * kDim, kHeads * kDim,
                uint16_t(1000 * layer + position));
  }
  std::vector<int64_t> prefill(Cache& cache, const Batch& batch, const std::vector<int64_t>& counts,
                               const std::vector<int64_t>& page_rows, int64_t layer) {
    int64_t row = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      const int64_t begin = cache.length(batch.ids()[i], layer);
      for (int64_t t = 0; t < counts[i]; ++t) number(row++, layer, begin + t);
    }
    std::vector<int64_t> unserved;
    PrefillOptions options;
    options.page_rows = page_rows;
    options.unserved = &unserved;
    cache.prefill(layer, batch, counts, view(rows_, row), view(rows_, row), options);
    test::finish_all();
    return unserved;
  }
  /** One token of each; `dense` looks at what others would read. */
  void decode(Cache& cache, const Batch& batch, int64_t layer, std::function<void()> dense,
              const std::vector<int64_t>& page_rows = {}) {
    for (int64_t i = 0; i < batch.size(); ++i) {
      number(i, layer, cache.length(batch.ids()[size_t(i)], layer));
    }
    AttendOptions options;
    options.dense = std::move(dense);
    options.page_rows = page_rows;
    cache.decode(layer, batch, view(q_, batch.size(), 2), view(rows_, batch.size()),
                 view(rows_, batch.size()), view(out_, batch.size(), 2), options);
  }
  /** A row of the table leads to the rows of so many tokens. */
  void expect_pages(const Pages& pages, const PageTable& table, int64_t row, int64_t layer,
                    int64_t tokens) {
    ASSERT_EQ(table.lengths[row], tokens);
    for (const TensorView& part : {pages.keys(), pages.values()}) {
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t page = table.pages[row * table.width + t / kSegment];
        for (int64_t head = 0; head < kHeads; ++head) {
          const auto* at = static_cast<const uint16_t*>(part.data) + page * part.strides[0] +
                           t % kSegment * part.strides[1] + head * part.strides[2];
          ASSERT_EQ(at[kDim - 1], uint16_t(1000 * layer + t)) << "token " << t;
        }
      }
    }
  }

  std::vector<uint16_t> rows_ = std::vector<uint16_t>(kMost * kHeads * kDim);
  std::vector<uint16_t> q_ = std::vector<uint16_t>(2 * 16 * kHeads * kDim), out_ = q_;
};

TEST_F(FakePages, AStoredPromptIsReadByItsTable) {
  Cache cache(config_of());
  const PageTable table = cache.page_table(8, 1000);
  const Pages pages = cache.pages();
  EXPECT_EQ(table.rows, 8);
  EXPECT_EQ(table.width, 16);
  const Batch batch = cache.batch({cache.add(), cache.add(), cache.add()});
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(prefill(cache, batch, {100, 64, 700}, {5, 0, 2}, layer).empty());
    expect_pages(pages, table, 5, layer, 100);
    expect_pages(pages, table, 0, layer, 64);
    expect_pages(pages, table, 2, layer, 700);
  }
  // A chunk, also of a sequence that steps search: prompts are attended to in full.
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(
        prefill(cache, cache.batch({batch.ids()[2], batch.ids()[0]}), {90, 1}, {1, 3}, layer)
            .empty());
    expect_pages(pages, table, 1, layer, 790);
    expect_pages(pages, table, 3, layer, 101);
  }
}

TEST_F(FakePages, MemoryThatIsReadyServesBlocksOfAnySize) {
  Config config = config_of();
  config.memory_budget = 64 << 20;
  Cache cache(config);
  EXPECT_THROW(cache.reserve_device(0), std::invalid_argument);
  EXPECT_THROW(cache.reserve_device(65 << 20), OutOfMemory);
  cache.reserve_device(32 << 20);
  const Batch batch = cache.batch({cache.add(), cache.add()});
  const int64_t mapped = test::pieces_mapped();
  EXPECT_GT(mapped, 0);
  for (int64_t l = 0; l < kLayers; ++l) prefill(cache, batch, {2200, 700}, {}, l);
  for (int64_t l = 0; l < kLayers; ++l) decode(cache, batch, l, {});
  EXPECT_EQ(test::pieces_mapped(), mapped) << "something was taken anew";
  for (const SequenceId id : batch.ids()) cache.remove(id);
  cache.trim();
  cache.reserve_device(2 << 20);
}

TEST_F(FakePages, AForkHasPagesOfItsOwnWhereItWrites) {
  Cache cache(config_of());
  const PageTable table = cache.page_table(2, 1000);
  const Pages pages = cache.pages();
  const SequenceId first = cache.add();
  for (int64_t l = 0; l < kLayers; ++l) prefill(cache, cache.batch({first}), {150}, {0}, l);
  const SequenceId second = cache.fork(first);
  for (int64_t l = 0; l < kLayers; ++l) {
    EXPECT_TRUE(prefill(cache, cache.batch({first, second}), {10, 20}, {0, 1}, l).empty());
    expect_pages(pages, table, 0, l, 160);
    expect_pages(pages, table, 1, l, 170);
    EXPECT_EQ(table.pages[0], table.pages[table.width]) << "a whole page is shared";
    EXPECT_NE(table.pages[2], table.pages[table.width + 2]);
  }
}

TEST_F(FakePages, LongerThanTheTableIsNotServed) {
  Cache cache(config_of());
  const PageTable table = cache.page_table(2, 128);
  const Pages pages = cache.pages();
  const Batch batch = cache.batch({cache.add(), cache.add()});
  for (int64_t l = 0; l < kLayers; ++l) {
    EXPECT_EQ(prefill(cache, batch, {129, 128}, {0, 1}, l), std::vector<int64_t>{0});
    EXPECT_EQ(table.lengths[0], 0);
    expect_pages(pages, table, 1, l, 128);
  }
}

TEST_F(FakePages, AStepLeavesSearchedSequencesToTheSearch) {
  Cache cache(config_of(500));
  const PageTable table = cache.page_table(8, 1000);
  const Pages pages = cache.pages();
  const Batch batch = cache.batch({cache.add(), cache.add(), cache.add()});
  for (int64_t l = 0; l < kLayers; ++l) prefill(cache, batch, {63, 600, 200}, {0, 1, 2}, l);
  for (int64_t step = 0; step < 30; ++step) {
    for (int64_t l = 0; l < kLayers; ++l) {
      int64_t calls = 0;
      decode(cache, batch, l, [&] {
        ++calls;
        test::finish_all();
        expect_pages(pages, table, 0, l, 64 + step);
        expect_pages(pages, table, 2, l, 201 + step);
        EXPECT_EQ(table.lengths[1], 0);
      });
      EXPECT_EQ(calls, 1);
    }
  }
  EXPECT_EQ(cache.stats().searched_tokens, 30 * kLayers);
  // In rows of the caller's choice.
  decode(cache, batch, 0,
         [&] {
           test::finish_all();
           expect_pages(pages, table, 7, 0, 94);
           expect_pages(pages, table, 3, 0, 231);
           EXPECT_EQ(table.lengths[5], 0);
         },
         {7, 5, 3});
}

TEST_F(FakePages, AdvanceSetsTheLengthsOfAReplay) {
  Cache cache(config_of(500));
  const PageTable table = cache.page_table(8, 1000);
  const Batch batch = cache.batch({cache.add(), kIdle, cache.add(), cache.add()});
  const Batch there = cache.batch({batch.ids()[0], batch.ids()[2], batch.ids()[3]});
  for (int64_t l = 0; l < kLayers; ++l) prefill(cache, there, {63, 480, 600}, {4, 5, 6}, l);
  for (int64_t step = 1; step <= 30; ++step) {
    cache.advance(batch);
    test::finish_all();
    EXPECT_EQ(table.lengths[0], 63 + step);
    EXPECT_EQ(table.lengths[1], 0);
    EXPECT_EQ(table.lengths[2], 480 + step < 500 ? 480 + step : 0);
    for (const int64_t row : {3, 4, 5, 6, 7}) EXPECT_EQ(table.lengths[row], 0) << row;
  }
}

TEST_F(FakePages, RowsInHostMemoryHaveNoNumbers) {
  Config config = config_of(100);
  config.placement = Placement::kHost;
  Cache cache(config);
  const PageTable table = cache.page_table(2, 1000);
  const Pages pages = cache.pages();
  const Batch batch = cache.batch({cache.add(), cache.add()});
  for (int64_t l = 0; l < kLayers; ++l) {
    EXPECT_TRUE(prefill(cache, batch, {700, 40}, {0, 1}, l).empty()) << "they have just come";
  }
  cache.stats();  // copies are done by then
  for (int64_t l = 0; l < kLayers; ++l) {
    EXPECT_EQ(prefill(cache, batch, {10, 10}, {0, 1}, l), std::vector<int64_t>{0});
    EXPECT_EQ(table.lengths[0], 0);
    expect_pages(pages, table, 1, l, 50);
  }
}

TEST_F(FakePages, WhatIsWrongIsSaid) {
  Cache cache(config_of());
  const Batch batch = cache.batch({cache.add(), cache.add()});
  const auto says = [&](const std::string& text, auto call) {
    try {
      call();
      ADD_FAILURE() << "nothing was said of " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  says("call page_table first", [&] { prefill(cache, batch, {5, 5}, {0, 1}, 0); });
  says("call page_table first", [&] { decode(cache, batch, 0, [] {}); });
  says("[page_table] sequences: expected 1 to 4096", [&] { cache.page_table(0, 100); });
  says("[page_table] tokens: expected 1 or more", [&] { cache.page_table(1, 0); });
  cache.page_table(2, 100);
  says("page_rows: expected each once, got 1 twice",
       [&] { prefill(cache, batch, {5, 5}, {1, 1}, 0); });
  says("page_rows: expected 0 to 1, got 2", [&] { prefill(cache, batch, {5, 5}, {0, 2}, 0); });
  says("page_rows", [&] { prefill(cache, batch, {5, 5}, {0}, 0); });
  says("lengths: expected 1 or more with page_rows",
       [&] { prefill(cache, batch, {5, 0}, {0, 1}, 0); });
  EXPECT_EQ(cache.stats().tokens, 0);
  Resources resources;
  resources.device = heap_resource();
  Cache borrowed(config_of(), resources);
  says("Resources::device", [&] { borrowed.pages(); });
  says("Resources::device", [&] { borrowed.page_table(2, 100); });
}

TEST_F(FakePages, AFailedStepLeavesTheCacheAsItWas) {
  Cache cache(config_of());
  cache.page_table(2, 1000);
  const Batch batch = cache.batch({cache.add()});
  for (int64_t l = 0; l < kLayers; ++l) prefill(cache, batch, {63}, {0}, l);
  EXPECT_THROW(decode(cache, batch, 0, [] { throw std::runtime_error("it cannot"); }),
               std::runtime_error);
  EXPECT_EQ(cache.length(batch.ids()[0], 0), 63);
  decode(cache, batch, 0, [] {});
  EXPECT_EQ(cache.length(batch.ids()[0], 0), 64);
}

}  // namespace

}  // namespace pariskv
