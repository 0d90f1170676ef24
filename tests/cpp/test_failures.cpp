// Whatever allocation fails, the cache is as it was and the next call works.
#include <gtest/gtest.h>

#include <functional>

#include "support.h"

namespace pariskv {
namespace {

using test::Driver;
using test::FailingResource;

/** Blocks so large that none shares a slab: every one is a call of the resource. */
Config roomy_config(int64_t block = 0) {
  Config config = test::small_config();
  config.query_heads = 8;
  config.kv_heads = 8;
  config.head_dim = 128;
  config.memory_budget = 96 << 20;  // beside which a slab for blocks of rows would be large
  auto& settings = std::get<ParisKV>(config.policy);
  settings.block = block;
  if (block == 0) settings.scorer = Scorer::kVotes;
  return config;
}

/** The same with rows that are kept: each flush makes a new block of them. */
Config keeping_config() {
  Config config = roomy_config();
  config.dense_below = 0;
  HardKV policy;
  policy.most = 64;
  policy.p = .8;
  config.policy = policy;
  return config;
}

/** The same with rows that are given back: of the first 241 some are when the test begins. */
Config dropping_config() {
  Config config = keeping_config();
  std::get<HardKV>(config.policy).placement = ZoneRows::kDropped;
  return config;
}

/** Coded, with rows of the zone in 8 bits, which opens when it is searched. */
Config narrow_config() {
  Config config = roomy_config();
  config.dense_below = 0;
  config.kv_dtype = KVDType::kInt8;
  return config;
}

/** Rows that are kept, and pages beside them. */
Config paging_config() {
  Config config = keeping_config();
  PRKV policy;
  policy.budget = 64;
  policy.static_share = .5;
  policy.page = 8;
  config.policy = policy;
  return config;
}

enum class Stored { kCoded, kNarrow, kKept, kPaged, kDropped };

Config config_for(Stored rows) {
  return rows == Stored::kCoded    ? roomy_config()
         : rows == Stored::kNarrow ? narrow_config()
         : rows == Stored::kKept   ? keeping_config()
         : rows == Stored::kPaged  ? paging_config()
                                   : dropping_config();
}

struct Snapshot {
  int64_t live, tokens, sequences, encoded, retrieval, keeps, dropped;
  std::vector<int64_t> kept;
  bool operator==(const Snapshot& other) const {
    return live == other.live && tokens == other.tokens && sequences == other.sequences &&
           encoded == other.encoded && retrieval == other.retrieval && keeps == other.keeps &&
           dropped == other.dropped && kept == other.kept;
  }
};

Snapshot snapshot(const Cache& cache, SequenceId sequence) {
  const Stats stats = cache.stats();
  std::vector<int64_t> kept;
  if (!std::holds_alternative<ParisKV>(cache.config().policy)) {
    test::Rows q(1, cache.config().query_heads, cache.config().head_dim, 9);
    const int64_t heads = cache.config().query_heads, dim = cache.config().head_dim;
    kept = cache
               .explain(0, sequence,
                        TensorView::contiguous(q.data.data(), DType::kFloat32, {heads, dim}))
               .kept;
  }
  // Scratch may grow or go on a failed call: it holds nothing between calls.
  return {stats.row_bytes + stats.summary_bytes + stats.kept_bytes,
          stats.tokens,
          stats.sequences,
          stats.encoded_keys,
          cache.regions(sequence).retrieval,
          stats.keeps,
          stats.dropped_rows,
          std::move(kept)};
}

/** What is done to a cache that holds one prompt. `extra` is a second, forked sequence. */
struct Deed {
  const char* name;
  std::function<void(Driver&)> act;
};

const Deed kDeeds[] = {
    {"prefill", [](Driver& driver) { driver.prefill(300); }},
    {"decode", [](Driver& driver) { driver.decode(); }},
    {"attend", [](Driver& driver) { driver.attend(300); }},
    {"prefill with queries", [](Driver& driver) { driver.prefill(300, true); }},
    {"truncate", [](Driver& driver) { driver.cache.truncate({driver.sequence}, Cut::drop({60})); }},
    {"fork", [](Driver& driver) { driver.cache.fork(driver.sequence); }},
    {"flush", [](Driver& driver) { driver.cache.flush({driver.sequence}); }},
    {"decode after fork",
     [](Driver& driver) {
       const SequenceId other = driver.cache.fork(driver.sequence);
       try {
         driver.decode();
       } catch (...) {
         driver.cache.remove(other);
         throw;
       }
       driver.cache.remove(other);
     }},
    {"reorder",
     [](Driver& driver) {
       const SequenceId other = driver.cache.add();
       try {
         driver.cache.reorder({driver.sequence, other}, {0, 0});
       } catch (...) {
         driver.cache.remove(other);
         throw;
       }
       driver.cache.remove(other);
     }},
    {"fork a prefix", [](Driver& driver) { driver.cache.fork_prefix(driver.sequence, 180); }},
};

class Failures : public testing::TestWithParam<std::tuple<int, bool, Stored>> {};

TEST_P(Failures, EveryAllocationInTurn) {
  const Deed& deed = kDeeds[std::get<0>(GetParam())];
  const bool forever = std::get<1>(GetParam());
  const Config config = config_for(std::get<2>(GetParam()));
  const Stored rows = std::get<2>(GetParam());
  const bool keeps = rows != Stored::kCoded && rows != Stored::kNarrow;
  const auto live = [&](Driver& driver) {
    driver.prefill(241, keeps);
    for (int i = 0; i < 15; ++i) driver.decode();  // the next one flushes and starts a segment
  };
  std::vector<std::vector<float>> calm;  // what follows where nothing ever fails
  {
    Cache cache(config);
    Driver driver{cache, cache.add()};
    live(driver);
    deed.act(driver);
    for (int i = 0; i < 20; ++i) calm.push_back(driver.decode());
  }
  bool succeeded = false;
  int64_t failures = 0;
  for (int64_t nth = 0; !succeeded; ++nth) {
    ASSERT_LT(nth, 100) << "never got through";
    const auto resource = std::make_shared<FailingResource>();
    Resources resources;
    resources.host = resource;
    Cache cache(config, resources);
    Driver driver{cache, cache.add()};
    live(driver);
    const Snapshot before = snapshot(cache, driver.sequence);
    resource->fail_at = resource->calls + nth;
    resource->forever = forever;
    try {
      deed.act(driver);
      succeeded = true;
    } catch (const OutOfMemory& error) {
      ++failures;
      EXPECT_NE(std::string(error.what()).find("[memory] asked for"), std::string::npos);
      resource->fail_at = -1;  // explain may need scratch
      EXPECT_TRUE(snapshot(cache, driver.sequence) == before) << deed.name << " " << nth;
      deed.act(driver);
    }
    resource->fail_at = -1;
    for (size_t i = 0; i < calm.size(); ++i) {
      ASSERT_EQ(driver.decode(), calm[i]) << deed.name << " " << i;
    }
    cache.remove(driver.sequence);
    for (const SequenceId id : cache.sequences()) cache.remove(id);
    const Stats stats = cache.stats();
    EXPECT_EQ(stats.row_bytes + stats.summary_bytes + stats.kept_bytes, 0);
  }
  // A flush of a few tokens may find room in the segment it is in, a cut needs none, and a ring of
  // queries is small enough for the slab of another one.
  const std::string name = deed.name;
  const bool forks = name == "fork" || name == "reorder" || name == "fork a prefix";
  const bool copies_a_ring = keeps && forks;
  const bool may_need_nothing = name == "flush" || name == "truncate" || copies_a_ring;
  EXPECT_TRUE(failures > 0 || may_need_nothing) << "nothing was put to the test";
}

INSTANTIATE_TEST_SUITE_P(All, Failures,
                         testing::Combine(testing::Range(0, 10), testing::Bool(),
                                          testing::Values(Stored::kCoded, Stored::kNarrow,
                                                          Stored::kKept, Stored::kPaged)));

/** The deeds that do without the rows that are gone. */
INSTANTIATE_TEST_SUITE_P(Dropped, Failures,
                         testing::Combine(testing::Values(1, 3, 5, 6, 7, 8), testing::Bool(),
                                          testing::Values(Stored::kDropped)));

TEST(Failures, RowsOfTheseTestsWereDropped) {
  Cache cache(dropping_config());
  Driver driver{cache, cache.add()};
  driver.prefill(241, true);
  for (int i = 0; i < 15; ++i) driver.decode();
  EXPECT_GT(cache.stats().dropped_rows, 0);
}

TEST(Failures, QueriesOfARefusedPromptAreGivenAgain) {
  // Chunks that end within windows of queries: the state is there before the zone.
  const Config config = roomy_config(64);
  const std::vector<int64_t> chunks = {245, 5, 250, 260, 600};
  Cache calm(config);
  Driver twin{calm, calm.add()};
  for (const int64_t tokens : chunks) twin.prefill(tokens, true);
  const Summaries expected = calm.summaries(0, twin.sequence);
  ASSERT_GT(expected.tokens, 0);
  int64_t failures = 0;
  for (int64_t nth = 0; nth <= failures; ++nth) {
    const auto resource = std::make_shared<FailingResource>();
    Resources resources;
    resources.host = resource;
    Cache cache(config, resources);
    Driver driver{cache, cache.add()};
    resource->fail_at = nth;
    for (const int64_t tokens : chunks) {
      const Snapshot before = snapshot(cache, driver.sequence);
      try {
        driver.prefill(tokens, true);
      } catch (const OutOfMemory&) {
        ++failures;
        EXPECT_TRUE(snapshot(cache, driver.sequence) == before) << nth;
        driver.prefill(tokens, true);
      }
    }
    const Summaries summaries = cache.summaries(0, driver.sequence);
    EXPECT_EQ(summaries.balance, expected.balance) << nth;
    EXPECT_EQ(summaries.means, expected.means) << nth;
    EXPECT_EQ(summaries.signs, expected.signs) << nth;
    EXPECT_EQ(summaries.weights, expected.weights) << nth;
  }
  EXPECT_GE(failures, 3) << "too little was put to the test";
}

TEST(Canary, DoesNotSurviveRemove) {
  const auto resource = std::make_shared<test::HoardingResource>();
  Resources resources;
  resources.host = resource;
  const Config config = test::small_config();
  Cache cache(config, resources);
  const uint32_t pattern = 0x4f1db1a5;  // an ordinary float
  float canary;
  std::memcpy(&canary, &pattern, sizeof canary);
  test::Rows rows(300, config.kv_heads, config.head_dim, 1);
  std::fill(rows.data.begin(), rows.data.end(), canary);

  const SequenceId sequence = cache.add();
  cache.prefill(0, {sequence}, {300}, rows.view(), rows.view());
  const SequenceId fork = cache.fork(sequence);
  Driver driver{cache, fork};
  for (int i = 0; i < 40; ++i) driver.decode();
  EXPECT_GE(resource->count(pattern), 2 * 300 * 2 * 64);

  cache.remove(sequence);
  EXPECT_GT(resource->count(pattern), 0) << "the fork still holds them";
  cache.remove(fork);
  EXPECT_EQ(resource->count(pattern), 0);
}

}  // namespace
}  // namespace pariskv
