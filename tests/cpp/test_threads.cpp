// Run under ThreadSanitizer as well as plainly; names with Threads are what that run picks.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "cpu/thread_pool.h"
#include "support.h"

namespace pariskv {
namespace {

using test::Driver;

TEST(Threads, PoolDoesEveryIndexOnce) {
  for (const int64_t threads : {1, 2, 3, 8}) {
    cpu::ThreadPool pool(threads);
    for (int64_t count = 0; count < 300; ++count) {
      std::vector<int> done(size_t(count), 0);
      pool.parallel_for(count, [&](int64_t i) { ++done[size_t(i)]; });
      for (const int times : done) ASSERT_EQ(times, 1);
    }
  }
}

TEST(Threads, PoolHandsOnAnException) {
  cpu::ThreadPool pool(3);
  const auto work = [](int64_t i) {
    if (i == 17) throw std::runtime_error("seventeen");
  };
  EXPECT_THROW(pool.parallel_for(100, work), std::runtime_error);
  std::atomic<int> after{0};
  pool.parallel_for(100, [&](int64_t) { ++after; });
  EXPECT_EQ(after, 100);
}

/** All outputs of a run over a cache of its own. */
std::vector<float> run(int64_t threads, uint32_t seed) {
  Config config = test::small_config();
  config.threads = threads;
  Cache cache(config);
  Driver driver{cache, cache.add(), seed};
  driver.prefill(150);
  std::vector<float> all;
  for (int i = 0; i < 40; ++i) {
    const std::vector<float> out = driver.decode();
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

TEST(Threads, SeparateCachesSideBySide) {
  std::vector<std::vector<float>> alone, together(4);
  for (uint32_t i = 0; i < 4; ++i) alone.push_back(run(1, i));
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < 4; ++i) {
    workers.emplace_back([&, i] { together[i] = run(2, i); });
  }
  for (std::thread& worker : workers) worker.join();
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(alone[i], together[i]);
}

TEST(Threads, OneCacheTakesTurns) {
  Config config = test::small_config();
  config.threads = 2;
  Cache cache(config);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      EXPECT_GE(cache.stats().sequences, 0);
      EXPECT_LE(cache.sequences().size(), 3u);
    }
  });
  std::vector<std::thread> writers;
  for (uint32_t i = 0; i < 3; ++i) {
    writers.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        Driver driver{cache, cache.add(), i};
        driver.prefill(100);
        for (int t = 0; t < 10; ++t) driver.decode();
        cache.remove(driver.sequence);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  stop = true;
  reader.join();
  EXPECT_EQ(cache.stats().tokens, 0);
  EXPECT_EQ(cache.stats().decode_tokens, 150);
}

}  // namespace
}  // namespace pariskv
