// An executor lends its threads: results stay the same, whatever it does with a task.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "support.h"

namespace pariskv {
namespace {

using test::Driver;

/** Counts what it is asked for, and does it as `how` says. */
class Counting : public Executor {
 public:
  explicit Counting(std::function<void(int64_t, const Task&)> how) : how_(std::move(how)) {}

  void run(int64_t times, const Task& task) override {
    ++runs;
    most = std::max(most, times);
    least = std::min(least, times);
    how_(times, task);
  }

  std::atomic<int64_t> runs{0};
  int64_t most = 0, least = 1000;

 private:
  std::function<void(int64_t, const Task&)> how_;
};

void on_new_threads(int64_t times, const Task& task) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < times; ++i) threads.emplace_back([&task] { task(); });
  for (std::thread& thread : threads) thread.join();
}

void on_the_caller(int64_t times, const Task& task) {
  for (int64_t i = 0; i < times; ++i) task();
}

/** Threads that begin a task when they like, also long after `run`. */
class Late {
 public:
  Late() : thread_([this] { serve(); }) {}
  ~Late() { end(); }

  void operator()(int64_t, const Task& task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(task);
    wake_.notify_one();
  }

  void end() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      end_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!end_ || !tasks_.empty()) {
      wake_.wait(lock, [this] { return end_ || !tasks_.empty(); });
      const std::vector<Task> tasks = std::move(tasks_);
      tasks_.clear();
      lock.unlock();
      for (const Task& task : tasks) task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Task> tasks_;
  bool end_ = false;
  std::thread thread_;
};

Config executor_config(int policy) {
  Config config = test::small_config();
  config.threads = 3;
  if (policy == 1) config.policy = HardKV();
  if (policy == 2) config.policy = PRKV();
  if (policy == 3) {  // a zone with summaries, a sample and a tail
    std::get<ParisKV>(config.policy).block = 64;
  }
  return config;
}

std::vector<float> outputs(int policy, std::shared_ptr<Executor> executor) {
  Resources resources;
  resources.executor = std::move(executor);
  Cache cache(executor_config(policy), resources);
  Driver driver{cache, cache.add()};
  driver.prefill(policy == 3 ? 1200 : 300, true);
  std::vector<float> all = driver.attend(20);
  for (int i = 0; i < 40; ++i) {
    const std::vector<float> out = driver.decode();
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

TEST(Executor, ResultsHaveTheSameBitsHoweverTasksRun) {
  for (int policy = 0; policy < 4; ++policy) {
    const std::vector<float> expected = outputs(policy, nullptr);
    const auto expect = [&](const char* name, std::function<void(int64_t, const Task&)> how) {
      const auto executor = std::make_shared<Counting>(std::move(how));
      EXPECT_EQ(outputs(policy, executor), expected) << name << ", policy " << policy;
      EXPECT_GT(executor->runs, 40) << name;
      EXPECT_GE(executor->least, 2) << name;
      EXPECT_EQ(executor->most, 3) << name << ": Config::threads";
    };
    expect("on new threads", on_new_threads);
    expect("on the caller", on_the_caller);
    expect("nothing", [](int64_t, const Task&) {});
    expect("too often", [](int64_t times, const Task& task) { on_new_threads(times + 3, task); });
    expect("once, then it fails", [](int64_t, const Task& task) {
      task();
      throw std::runtime_error("no threads today");
    });
  }
}

TEST(Executor, ATaskThatComesLateDoesNoHarm) {
  for (int policy = 0; policy < 4; ++policy) {
    auto late = std::make_shared<Late>();
    const auto executor = std::make_shared<Counting>(
        [late](int64_t times, const Task& task) { (*late)(times, task); });
    Resources resources;
    resources.executor = executor;
    Cache cache(executor_config(policy), resources), plain(executor_config(policy));
    Driver driver{cache, cache.add()}, twin{plain, plain.add()};
    for (Driver* each : {&driver, &twin}) each->prefill(300, true);
    for (int i = 0; i < 200; ++i) ASSERT_EQ(driver.decode(), twin.decode()) << i;
    late->end();  // before the cache does
    EXPECT_GT(executor->runs, 200);
  }
}

int64_t threads_of_this_process() {
  int64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    count += !entry.path().empty();
  }
  return count;
}

TEST(Executor, TheCacheStartsNoThreads) {
  if (!std::filesystem::exists("/proc/self/task")) GTEST_SKIP() << "waits for /proc";
  Resources resources;
  resources.executor = std::make_shared<Counting>(on_the_caller);
  const int64_t before = threads_of_this_process();
  Cache cache(executor_config(0), resources);
  Driver driver{cache, cache.add()};
  driver.prefill(300);
  driver.decode();
  EXPECT_EQ(threads_of_this_process(), before);
  const Cache own(executor_config(0));
  // A sanitizer may start one of its own with the first.
  EXPECT_GE(threads_of_this_process(), before + 2);
}

TEST(Executor, OneThreadAsksForNone) {
  const auto executor = std::make_shared<Counting>(on_new_threads);
  Resources resources;
  resources.executor = executor;
  Config config = executor_config(0);
  config.threads = 1;
  Cache cache(config, resources);
  Driver driver{cache, cache.add()};
  driver.prefill(300);
  driver.decode();
  EXPECT_EQ(executor->runs, 0);
}

TEST(Executor, CachesOnManyThreadsShareOne) {
  std::vector<std::vector<float>> alone, together(4);
  for (int i = 0; i < 4; ++i) alone.push_back(outputs(i, nullptr));
  struct Shared : Executor {
    void run(int64_t times, const Task& task) override { on_new_threads(times, task); }
  };
  const auto executor = std::make_shared<Shared>();
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&, i] { together[size_t(i)] = outputs(i, executor); });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(together, alone);
}

TEST(Executor, ACallIsStoppedOnAnyThreads) {
  for (const auto& how : {on_new_threads, on_the_caller}) {
    std::atomic<bool> stop{false};
    Resources resources;
    resources.executor = std::make_shared<Counting>(how);
    resources.should_stop = [&] { return stop.load(); };
    Cache cache(executor_config(3), resources), plain(executor_config(3));
    Driver driver{cache, cache.add()}, twin{plain, plain.add()};
    for (Driver* each : {&driver, &twin}) each->prefill(1200, true);
    stop = true;
    EXPECT_THROW(driver.decode(), Stopped);
    stop = false;
    for (int i = 0; i < 5; ++i) EXPECT_EQ(driver.decode(), twin.decode());
  }
}

}  // namespace
}  // namespace pariskv
