// Saved sequences continue as if they had never left.
#include <gtest/gtest.h>

#include "saved/checksum.h"
#include "saved/format.h"
#include "saved_support.h"
#include "support.h"

namespace pariskv {
namespace {

using test::config_of;
using test::contents;
using test::Driver;
using test::Folder;
using test::later;
using test::lived;

TEST(Checksum, IsXxh64) {
  const auto of = [](const std::string& text) { return checksum_of(text.data(), text.size()); };
  EXPECT_EQ(of(""), 0xef46db3751d8e999u);
  EXPECT_EQ(of("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(of("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
}

struct Kind {
  int64_t block;
  Scorer scorer;
};

class Saved : public testing::TestWithParam<Kind> {};

TEST_P(Saved, ContinuesWithTheSameBits) {
  const Config config = config_of(GetParam().block, GetParam().scorer);
  const Folder folder;
  Cache cache(config), other(config);
  uint32_t step = 0;
  const SequenceId sequence = lived(cache, step);
  cache.save(sequence, folder / "one");
  Driver filler{other, other.add()};
  filler.prefill(100);
  const SequenceId loaded = other.load(folder / "one");
  const RegionCounts regions = cache.regions(sequence), again = other.regions(loaded);
  EXPECT_EQ(regions.retrieval, again.retrieval);
  EXPECT_EQ(regions.buffer, again.buffer);
  EXPECT_GT(again.retrieval, 64);
  other.save(loaded, folder / "two");
  EXPECT_TRUE(contents(folder / "one") == contents(folder / "two"));
  EXPECT_EQ(later(cache, sequence, step), later(other, loaded, step));
}

INSTANTIATE_TEST_SUITE_P(Kinds, Saved,
                         testing::Values(Kind{0, Scorer::kSignNorm}, Kind{0, Scorer::kVotes},
                                         Kind{64, Scorer::kSignNorm}),
                         [](const auto& info) {
                           return (info.param.scorer == Scorer::kVotes ? "votes" : "block") +
                                  std::to_string(info.param.block);
                         });

TEST(Saved, SavingChangesNothing) {
  const Folder folder;
  Cache cache(config_of()), calm(config_of());
  uint32_t step = 0;
  const SequenceId sequence = lived(cache, step), twin = lived(calm, step);
  cache.save(sequence, folder / "one");
  cache.save(cache.fork(sequence), folder / "two");
  EXPECT_TRUE(contents(folder / "one") == contents(folder / "two"));
  EXPECT_EQ(later(cache, sequence, step), later(calm, twin, step));
}

TEST(Saved, SequencesOfAnySizeComeBack) {
  const Folder folder;
  Config config = config_of();
  config.layers = 3;
  config.value_dim = 128;
  Cache cache(config), other(config);
  for (const int64_t tokens : {0, 1, 63, 64, 65, 250, 1000, 1300}) {
    const SequenceId sequence = cache.add();
    for (const int64_t layer : {0, 2}) {  // a layer has none
      test::Rows k(tokens, 2, 64, 1), v(tokens, 2, 128, 2);
      cache.prefill(layer, {sequence}, {tokens}, k.view(), v.view());
    }
    cache.save(sequence, folder / "one");
    const SequenceId loaded = other.load(folder / "one");
    for (int64_t layer = 0; layer < 3; ++layer) {
      const int64_t length = layer == 1 ? 0 : tokens;
      ASSERT_EQ(other.length(loaded, layer), length);
      test::Rows k(length, 2, 64, 3), v(length, 2, 128, 4), k2 = k, v2 = v;
      cache.read(layer, sequence, 0, k.view(), v.view());
      other.read(layer, loaded, 0, k2.view(), v2.view());
      EXPECT_EQ(k.data, k2.data);
      EXPECT_EQ(v.data, v2.data);
      EXPECT_EQ(cache.summaries(layer, sequence).signs, other.summaries(layer, loaded).signs);
    }
  }
}

TEST(Saved, QueriesOfAPromptThatGoesOnCount) {
  // Saved before its zone opens: the balance is set by queries from before and from after.
  const Folder folder;
  Cache cache(config_of()), other(config_of());
  Driver driver{cache, cache.add()};
  driver.prefill(500, true);  // within a window of queries
  ASSERT_EQ(cache.regions(driver.sequence).retrieval, 0);
  cache.save(driver.sequence, folder / "one");
  Driver loaded{other, other.load(folder / "one"), driver.step};
  driver.prefill(700, true);
  loaded.prefill(700, true);
  const Summaries expected = cache.summaries(0, driver.sequence);
  ASSERT_GT(expected.tokens, 0);
  EXPECT_EQ(expected.balance, other.summaries(0, loaded.sequence).balance);
  EXPECT_EQ(expected.weights, other.summaries(0, loaded.sequence).weights);
}

TEST(Saved, TokensThatWereTakenBackAreNotInTheFile) {
  for (const int64_t block : {0, 64}) {
    const Folder folder;
    Config config = config_of(block);
    config.segment_tokens = 256;  // the zone ends within one
    Cache cache(config);
    Driver driver{cache, cache.add()};
    driver.prefill(1400);
    cache.save(driver.sequence, folder / "before");
    driver.prefill(100);  // within the same segments
    cache.truncate({driver.sequence}, Cut::keep({1400}));
    cache.save(driver.sequence, folder / "after");
    // Headers differ by where the buffer begins, and by their checksums.
    const std::string before = contents(folder / "before"), after = contents(folder / "after");
    ASSERT_EQ(before.size(), after.size());
    const size_t header = 1000;
    EXPECT_TRUE(before.substr(header) == after.substr(header)) << block;
  }
}

TEST(Saved, AnotherSearchAndOtherWindowsMayLoadIt) {
  const Folder folder;
  Cache cache(config_of());
  uint32_t step = 0;
  const SequenceId sequence = lived(cache, step);
  cache.save(sequence, folder / "one");
  Config config = config_of();
  config.local = 32, config.update = 5, config.dense_below = 10, config.threads = 2;
  auto& policy = std::get<ParisKV>(config.policy);
  policy.top_k = 9, policy.tail = TailRule::kNone, policy.min_candidates_per_row = 2;
  Cache other(config);
  const SequenceId loaded = other.load(folder / "one");
  later(other, loaded, step);
  EXPECT_EQ(other.length(loaded), 5 + 1300 + 3);
}

/** As of a policy that stores nothing beside K and V, and of a backend without searches. */
TEST(Saved, ALayerNeedsNoSummariesAndNoState) {
  const RegionSizes regions{4, 8, 16};
  SavedSizes sizes{regions, 64, 1024, 0, 0, {}};
  SavedHeader header;
  header.layers = {{Regions().prefilled(200, regions).marks(), 0, 0}};
  const std::vector<Piece> pieces = pieces_of(header.layers, sizes);
  ASSERT_EQ(pieces.size(), 4u);
  for (const Piece& piece : pieces) {
    EXPECT_EQ(piece.kind, Piece::Kind::kRows);
    EXPECT_GT(piece.bytes, 0);
  }
  const Folder folder;
  test::put(folder / "rows", std::string(200 * 1024, 'x'));
  const OldFile file(folder / "rows");
  EXPECT_NO_THROW(check_layers(file, header, 1, sizes));
  header.layers[0].has_state = 1;
  EXPECT_THROW(check_layers(file, header, 1, sizes), std::invalid_argument);
  header.layers[0].has_state = 0;
  sizes.state_bytes = 64;
  EXPECT_THROW(check_layers(file, header, 1, sizes), std::invalid_argument);
}

}  // namespace
}  // namespace pariskv
