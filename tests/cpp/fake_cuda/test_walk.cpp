// Long lives of caches on the fake device: whatever is called in whatever order, on whatever
// stream, however often memory runs out and whatever call of CUDA's fails, every sequence has the
// rows that it was given.
#include <gtest/gtest.h>

#include "life.h"

namespace pariskv {
namespace {

using test::Life;

constexpr int kSeeds = 60, kSteps = 250;

class FakeCuda : public testing::Test {
 protected:
  FakeCuda() {
    test::wrong().clear();
    test::callers_work_late() = true;
  }
  ~FakeCuda() override {
    test::finish_all();
    test::callers_work_late() = false;
    test::fault_switches() = {};
    test::wrong().clear();
  }

  /** A life for each seed, with calls that fail in most of them; `each` sees it at its end. */
  template <typename Each>
  void live(Config (*config_of)(int), Each each) {
    for (int seed = 0; seed < kSeeds; ++seed) {
      Life life(config_of(seed), seed);
      test::fault_switches().nothing_by_chance = seed % 3 == 1;
      for (int i = 0; i < kSteps; ++i) {
        seed % 4 == 0 || i % 2 == 0 ? life.step() : life.faulty_step();
        ASSERT_EQ(test::wrong(), "") << "seed " << seed << ", step " << i;
      }
      each(life);
    }
  }
};

TEST_F(FakeCuda, EverySequenceKeepsItsRows) {
  int64_t refused = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Life life(seed);
    for (int i = 0; i < kSteps; ++i) {
      life.step();
      ASSERT_EQ(test::wrong(), "") << "seed " << seed << ", step " << i;
    }
    refused += life.refused();
    EXPECT_EQ(life.failed(), 0);
  }
  EXPECT_GT(refused, 0) << "memory was never short";
}

TEST_F(FakeCuda, NoSequencesPassTheirBoundOfMemory) {
  for (const auto config_of : {Life::config_of, Life::narrow_config_of, Life::kept_config_of,
                               Life::paged_config_of, Life::dropped_config_of}) {
    for (int seed = 0; seed < 8; ++seed) {
      Config config = config_of(seed);
      config.memory_budget = config.host_budget = 0;
      Life life(config, seed);
      for (int i = 0; i < kSteps; ++i) {
        life.step();
        const auto [device, host] = life.beyond_bound();
        ASSERT_LE(device, 0) << "seed " << seed << ", step " << i;
        ASSERT_LE(host, 0) << "seed " << seed << ", step " << i;
      }
    }
  }
}

TEST_F(FakeCuda, EverySequenceKeepsItsRowsWhateverFails) {
  int64_t failed = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Life life(seed);
    for (int i = 0; i < kSteps; ++i) {
      i % 2 == 0 ? life.step() : life.faulty_step();
      ASSERT_EQ(test::wrong(), "") << "seed " << seed << ", step " << i;
    }
    failed += life.failed();
  }
  EXPECT_GT(failed, kSeeds * kSteps / 20) << "hardly anything was refused";
}

TEST_F(FakeCuda, EverySequenceKeepsItsRowsOnTheLatestDevice) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    test::fault_switches().nothing_by_chance = true;
    Life life(seed);
    for (int i = 0; i < kSteps; ++i) {
      seed % 2 == 0 || i % 2 == 0 ? life.step() : life.faulty_step();
      ASSERT_EQ(test::wrong(), "") << "seed " << seed << ", step " << i;
    }
  }
}

TEST_F(FakeCuda, NarrowRowsAreThoseGivenWhateverFails) {
  int64_t refused = 0, failed = 0, offloaded = 0;
  live(Life::narrow_config_of, [&](Life& life) {
    refused += life.refused();
    failed += life.failed();
    offloaded += life.stats().offloaded_bytes;
  });
  EXPECT_GT(refused, 0) << "memory was never short";
  EXPECT_GT(failed, kSeeds * kSteps / 30) << "hardly anything was refused";
  EXPECT_GT(offloaded, 0) << "no row left";
}

TEST_F(FakeCuda, KeptRowsAreThoseAtHomeWhateverFails) {
  int64_t refused = 0, failed = 0, keeps = 0;
  live(Life::kept_config_of, [&](Life& life) {
    refused += life.refused();
    failed += life.failed();
    keeps += life.stats().keeps;
  });
  EXPECT_GT(refused, 0) << "memory was never short";
  EXPECT_GT(failed, kSeeds * kSteps / 30) << "hardly anything was refused";
  EXPECT_GT(keeps, kSeeds * kSteps / 10) << "hardly anything was chosen";
}

TEST_F(FakeCuda, PagesHaveTheirDigestsWhateverFails) {
  int64_t refused = 0, failed = 0, keeps = 0;
  live(Life::paged_config_of, [&](Life& life) {
    refused += life.refused();
    failed += life.failed();
    keeps += life.stats().keeps;
  });
  EXPECT_GT(refused, 0) << "memory was never short";
  EXPECT_GT(failed, kSeeds * kSteps / 30) << "hardly anything was refused";
  EXPECT_GT(keeps, kSeeds * kSteps / 15) << "hardly anything was chosen";
}

TEST_F(FakeCuda, RowsThatWereNotDroppedAreThereWhateverFails) {
  int64_t failed = 0, declined = 0, dropped = 0;
  live(Life::dropped_config_of, [&](Life& life) {
    failed += life.failed();
    declined += life.declined();
    dropped += life.stats().dropped_rows > 0;
  });
  EXPECT_GT(failed, kSeeds * kSteps / 30) << "hardly anything was refused";
  EXPECT_GT(declined, kSeeds) << "hardly any call needed rows that were dropped";
  EXPECT_GT(dropped, kSeeds / 2) << "hardly anything was dropped";
}

TEST_F(FakeCuda, ControlRowsReadTooEarlyAreDetected) {
  // The control: offloaded rows that count as arrived before they are.
  int seen = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    test::fault_switches().events_pass_early = true;
    test::fault_switches().nothing_by_chance = true;
    test::wrong().clear();
    Life life(seed);
    for (int i = 0; i < kSteps && test::wrong().empty(); ++i) life.step();
    seen += !test::wrong().empty();
    test::finish_all();  // the cache would not wait for what it believes to have arrived
  }
  EXPECT_GE(seen, kSeeds / 2);
}

}  // namespace
}  // namespace pariskv
