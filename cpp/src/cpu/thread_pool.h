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

#include "stop.h"

namespace pariskv::cpu {

class ThreadPool {
 public:
  /**
   * @param threads  including the caller; 0 takes one per core
   * @param stop     asked by the caller's thread between two indices
   */
  explicit ThreadPool(int64_t threads, StopCheck stop = StopCheck());
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int64_t threads() const { return threads_; }

  /**
   * Calls `work(i)` for every i in [0, count), in any order, and waits for all. Throws Stopped,
   * with some indices left out, when the call is told to stop.
   */
  template <typename Work>
  void parallel_for(int64_t count, const Work& work) {
    run(count, task_of(work), true);
  }

  /** The same for work on state that a stopped call must leave unchanged. */
  template <typename Work>
  void parallel_for_all(int64_t count, const Work& work) {
    run(count, task_of(work), false);
  }

  /** For long work on one index: throws Stopped when the call is told to stop. */
  void check_stop();

 private:
  struct Task {
    const void* self;
    void (*call)(const void* self, int64_t index);
  };
  struct Shared;
  // A bare pointer, not a std::function: nothing on the way of a step may allocate.
  template <typename Work>
  static Task task_of(const Work& work) {
    return {&work, [](const void* self, int64_t i) { (*static_cast<const Work*>(self))(i); }};
  }
  void run(int64_t count, Task task, bool stops);
  void keep_off(int cpu);
  static void serve(Shared& shared);

  const StopCheck stop_;
  int64_t threads_;
  int64_t owner_process_;  // after fork(2) the workers exist in the parent alone
  int avoided_cpu_ = -1;   // where the workers do not run: the caller's
  Shared* shared_;
  std::vector<std::thread> workers_;
};

}  // namespace pariskv::cpu
