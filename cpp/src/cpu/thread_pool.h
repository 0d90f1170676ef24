/**
 * A few threads that take indices one by one. The caller is one of them. How work is cut
 * into indices never depends on how many threads there are, so results do not either.
 */
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace pariskv::cpu {

class ThreadPool {
 public:
  /** @param threads including the caller; 0 takes one per core. */
  explicit ThreadPool(int64_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int64_t threads() const { return threads_; }

  /** Calls `work(i)` for every i in [0, count), in any order, and waits for all. */
  template <typename Work>
  void parallel_for(int64_t count, const Work& work) {
    // A bare pointer, not a std::function: nothing on the way of a step may allocate.
    run(count, {&work, [](const void* self, int64_t i) { (*static_cast<const Work*>(self))(i); }});
  }

 private:
  struct Task {
    const void* self;
    void (*call)(const void* self, int64_t index);
  };
  struct Shared;
  void run(int64_t count, Task task);
  void keep_off(int cpu);
  static void serve(Shared& shared);

  int64_t threads_;
  int64_t owner_process_;  // after fork(2) the workers exist in the parent alone
  int avoided_cpu_ = -1;   // where the workers do not run: the caller's
  Shared* shared_;
  std::vector<std::thread> workers_;
};

}  // namespace pariskv::cpu
