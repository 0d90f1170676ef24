// A call that is told to stop throws Stopped, and the cache is as it was: wherever it is told.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include "support.h"

namespace pariskv {
namespace {

using test::Driver;

/** Says stop when it is asked for the nth time. */
struct Stopper {
  int64_t asked = 0;
  int64_t stop_at = -1;
  bool operator()() { return asked++ == stop_at; }
};

Resources resources_of(Stopper& stopper) {
  Resources resources;
  resources.should_stop = [&stopper] { return stopper(); };
  return resources;
}

/** Zones of blocks, which learn from the prompt's queries; or kept rows and remembered queries. */
Config config_of(bool keeps, int64_t threads) {
  Config config = test::small_config();
  config.threads = threads;
  config.update = 96;
  config.dense_below = 0;
  if (keeps) {
    HardKV policy;
    policy.most = 64;
    policy.p = .8;
    config.policy = policy;
  } else {
    std::get<ParisKV>(config.policy).block = 64;
  }
  return config;
}

/** All that a cache says of its state. */
std::vector<int64_t> state_of(const Cache& cache) {
  const Stats stats = cache.stats();
  std::vector<int64_t> state{stats.tokens,       stats.sequences,    stats.encoded_keys,
                             stats.keeps,        stats.kept_rows,    stats.decode_tokens,
                             stats.candidates,   stats.fetched_rows, stats.flushes,
                             stats.unusable_keys};
  for (const SequenceId sequence : cache.sequences()) {
    state.push_back(sequence);
    state.push_back(cache.regions(sequence).retrieval);
  }
  return state;
}

// Tests run in several processes at a time.
const std::string kFile = testing::TempDir() + "/pariskv_stop_" + std::to_string(getpid());

struct Deed {
  const char* name;
  std::function<void(Driver&)> act;
};

const Deed kDeeds[] = {
    {"prefill", [](Driver& driver) { driver.prefill(300, true); }},
    {"attend", [](Driver& driver) { driver.attend(300); }},
    {"decode", [](Driver& driver) { driver.decode(); }},
    {"flush", [](Driver& driver) { driver.cache.flush_all(); }},
    {"truncate",
     [](Driver& driver) {  // rows are kept anew where queries are left to choose them
       const bool keeps = std::holds_alternative<HardKV>(driver.cache.config().policy);
       driver.cache.truncate({driver.sequence}, Cut::drop({keeps ? 20 : 150}));
     }},
    {"save", [](Driver& driver) { driver.cache.save(driver.sequence, kFile); }},
    {"load",
     [](Driver& driver) {
       const SequenceId other = driver.cache.load(kFile);
       driver.cache.remove(other);
     }},
};

class Stops : public testing::TestWithParam<std::tuple<int, bool, int>> {};

TEST_P(Stops, LeaveTheCacheAsItWas) {
  const Deed& deed = kDeeds[std::get<0>(GetParam())];
  const bool keeps = std::get<1>(GetParam());
  const std::string name = deed.name;
  const bool files = name == "save" || name == "load";
  if (keeps && files) return;  // sequences of HardKV fit no file
  const Config config = config_of(keeps, std::get<2>(GetParam()));
  const auto live = [&](Driver& driver) {
    driver.prefill(keeps ? 341 : 1109, true);  // there is a zone
    // The next one flushes, and so would a flush: more than a block of 64 is in the buffer.
    for (int i = 0; i < (keeps ? 95 : 82); ++i) driver.decode();
    if (keeps && name == "truncate") driver.cache.flush_all();  // a short cut then meets the zone
  };
  std::vector<std::vector<float>> calm;  // what follows where nothing was stopped
  {
    Cache cache(config);
    Driver driver{cache, cache.add()};
    live(driver);
    if (!files) deed.act(driver);
    for (int i = 0; i < 40; ++i) calm.push_back(driver.decode());
  }
  int64_t stops = 0;
  bool succeeded = false;
  for (int64_t nth = 0; !succeeded; nth += 1 + nth / 8) {
    Stopper stopper;
    Cache cache(config, resources_of(stopper));
    Driver driver{cache, cache.add()};
    live(driver);
    if (files) cache.save(driver.sequence, kFile);

    const std::vector<int64_t> before = state_of(cache);
    stopper.stop_at = stopper.asked + nth;
    try {
      deed.act(driver);
      succeeded = true;
    } catch (const Stopped&) {
      ++stops;
      EXPECT_EQ(state_of(cache), before) << name << " " << nth;
      deed.act(driver);
    }
    stopper.stop_at = -1;
    for (size_t i = 0; i < calm.size(); ++i) {
      ASSERT_EQ(driver.decode(), calm[i]) << name << " " << nth << " " << i;
    }
  }
  // With several threads workers may take all of a short call before it asks.
  EXPECT_TRUE(stops > 0 || config.threads > 1) << "nothing was put to the test";
  std::remove(kFile.c_str());
}

INSTANTIATE_TEST_SUITE_P(All, Stops,
                         testing::Combine(testing::Range(0, 7), testing::Bool(),
                                          testing::Values(1, 3)));

TEST(Stopping, EndsALongPieceOfWorkOnEveryThread) {
  // One kv head and 32 queries are one task, so only the inside of it can ask.
  Config config = test::small_config();
  config.kv_heads = 1;
  config.query_heads = 4;
  Stopper stopper;
  Cache cache(config, resources_of(stopper));
  Driver driver{cache, cache.add()};
  driver.prefill(5000);
  stopper.stop_at = stopper.asked + 3;
  test::Rows q(8, 4, 64, 1), out(8, 4, 64, 0);
  EXPECT_THROW(cache.attend(0, {driver.sequence}, {8}, q.view(), out.view()), Stopped);
  EXPECT_EQ(stopper.asked, stopper.stop_at + 1);
}

TEST(Stopping, EndsWaitingForATurn) {
  std::atomic<bool> inside{false}, leave{false}, stop{false};
  const std::thread::id here = std::this_thread::get_id();
  Resources resources;
  resources.should_stop = [&] {
    if (std::this_thread::get_id() == here) return stop.load();
    inside = true;
    while (!leave) std::this_thread::yield();
    return false;
  };
  Cache cache(test::small_config(), resources);
  const SequenceId sequence = cache.add();
  std::thread other([&] {
    Driver driver{cache, sequence};
    driver.prefill(10);
  });
  while (!inside) std::this_thread::yield();
  stop = true;
  EXPECT_THROW(cache.length(sequence), Stopped);
  leave = true;
  other.join();
  stop = false;
  EXPECT_EQ(cache.length(sequence), 10);
}

TEST(Stopping, ACallFromInsideACallIsRefused) {
  Cache* self = nullptr;
  int64_t refused = 0;
  Resources resources;
  resources.should_stop = [&] {
    try {
      self->stats();
    } catch (const std::invalid_argument& error) {
      refused += std::string(error.what()).find("inside a call on this cache") != std::string::npos;
    }
    return false;
  };
  Cache cache(test::small_config(), resources);
  self = &cache;
  Driver driver{cache, cache.add()};
  driver.prefill(10);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace pariskv
