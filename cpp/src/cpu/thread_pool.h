/**
 * A few threads that take indices one by one. The caller is one of them. How work is cut
 * into indices never depends on how many threads there are, so results do not either. An executor's
 * threads take the place of the pool's own.
 */
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pariskv/executor.h"
#include "stop.h"

namespace pariskv::cpu {

class ThreadPool {
 public:
  /**
   * @param threads   including the caller; 0 takes one per core
   * @param stop      asked by the caller's thread between two indices
   * @param executor  whose threads do the work; null: the pool starts its own
   */
  explicit ThreadPool(int64_t threads, StopCheck stop = StopCheck(),
                      std::shared_ptr<Executor> executor = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int64_t threads() const { return threads_; }

  /**
   * Calls `work(i)` for every i in [0, count), in any order, and waits for all. Throws Stopped,
   * with some indices left out, when the call is told to stop.
   */
  template <typename Function>
  void parallel_for(int64_t count, const Function& work) {
    run(count, work_of(work), true);
  }

  /** The same for work on state that a stopped call must leave unchanged. */
  template <typename Function>
  void parallel_for_all(int64_t count, const Function& work) {
    run(count, work_of(work), false);
  }

  /** For long work on one index: throws Stopped when the call is told to stop. */
  void check_stop();

 private:
  struct Work {
    const void* self;
    void (*call)(const void* self, int64_t index);
  };
  struct Shared;
  // A bare pointer, not a std::function: nothing on the way of a step may allocate.
  template <typename Function>
  static Work work_of(const Function& function) {
    return {&function,
            [](const void* self, int64_t i) { (*static_cast<const Function*>(self))(i); }};
  }
  void run(int64_t count, Work work, bool stops);
  void keep_off(int cpu);
  void ask_executor(int64_t count);
  static void serve(Shared& shared);

  const StopCheck stop_;
  const std::shared_ptr<Executor> executor_;
  int64_t threads_;
  int64_t owner_process_;  // after fork(2) the workers exist in the parent alone
  int avoided_cpu_ = -1;   // where the workers do not run: the caller's
  Shared* shared_;
  std::vector<std::thread> workers_;
};

}  // namespace pariskv::cpu
