#include "cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "process.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pariskv::cpu {

namespace {

// Verbs follow one another within microseconds: a worker looks this often for the next one
// before it sleeps, since waking it costs more than a short verb.
constexpr int kSpins = 2000;

// A caller that waits for workers asks this often whether the call is to stop.
constexpr std::chrono::milliseconds kAskAgain{20};

int this_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct ThreadPool::Shared {
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::atomic<uint64_t> round{0};  // rises by one with every parallel_for
  bool stop = false;

  Work work{};
  bool open = false;  // workers may still join the present round
  int64_t count = 0;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> busy{0};  // workers inside the present round; changed under the mutex
  std::atomic<int> caller_cpu{-1};
  std::atomic<bool> collided{false};  // a worker found itself on the caller's core
  std::atomic<bool> stopped{false};   // the caller was told to stop: workers may leave, too
  std::thread::id caller;             // of the present round
  const StopCheck* asked = nullptr;   // by the caller between two indices; null: not asked
  std::exception_ptr failure;

  /** @param asks  null: does not ask */
  void take_part(const StopCheck* asks) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        if (asks != nullptr) check(*asks);
        work.call(work.self, i);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!failure) failure = std::current_exception();
        if (stopped) next.store(count);  // no thread begins another index
      }
    }
  }

  /** A thread of an executor joins the round. Where that is over already, it does nothing. */
  void join() {
    const StopCheck* asks = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!open) return;
      ++busy;
      if (caller == std::this_thread::get_id()) asks = asked;
    }
    take_part(asks);
    leave();
  }

  void leave() {
    const std::lock_guard<std::mutex> lock(mutex);
    --busy;
    if (busy == 0) done.notify_all();
  }

  /** On the caller's thread. */
  void check(const StopCheck& asks) {
    if (!asks.wanted()) return;
    stopped = true;
    throw pariskv::stopped();
  }
};

ThreadPool::ThreadPool(int64_t threads, StopCheck stop, std::shared_ptr<Executor> executor)
    : stop_(std::move(stop)),
      executor_(std::move(executor)),
      threads_(threads > 0 ? threads : std::max<int64_t>(1, std::thread::hardware_concurrency())),
      owner_process_(this_process()),
      shared_(new Shared) {
  if (executor_) return;
  workers_.reserve(size_t(threads_ - 1));
  try {
    for (int64_t i = 1; i < threads_; ++i) {
      workers_.emplace_back([shared = shared_] { serve(*shared); });
    }
  } catch (const std::exception&) {
    threads_ = int64_t(workers_.size()) + 1;  // the system gave fewer; results stay the same
  }
}

ThreadPool::~ThreadPool() {
  if (this_process() != owner_process_) {
    // A fork's child: there is nobody to join. The handles and what the lost threads may have
    // held locked are left alone.
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->stop = true;
    shared_->round.fetch_add(1);  // under the lock: a worker about to sleep must not miss it
  }
  shared_->wake.notify_all();
  for (std::thread& worker : workers_) worker.join();
  delete shared_;
}

void ThreadPool::serve(Shared& shared) {
  uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins && shared.round.load() == seen; ++spin) pause();
    {
      std::unique_lock<std::mutex> lock(shared.mutex);
      shared.wake.wait(lock, [&] { return shared.round.load() != seen; });
      if (shared.stop) return;
      seen = shared.round.load();
      // Late for a round that the others have finished already: nothing to join.
      if (!shared.open) continue;
      ++shared.busy;
    }
    if (this_cpu() == shared.caller_cpu) shared.collided = true;
    shared.take_part(nullptr);
    shared.leave();
  }
}

/**
 * A worker that wakes may be put on the core of whoever woke it, and then the two take turns
 * while another core idles: measured, that doubles a step. Where it was seen to happen, workers
 * may run anywhere but there.
 */
void ThreadPool::keep_off(int cpu) {
#if defined(__linux__)
  if (cpu == avoided_cpu_ || cpu < 0) return;
  avoided_cpu_ = cpu;
  cpu_set_t allowed;  // the caller's own: what the process was confined to stays so
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  CPU_CLR(cpu, &allowed);
  for (std::thread& worker : workers_) {
    pthread_setaffinity_np(worker.native_handle(), sizeof allowed, &allowed);
  }
#else
  (void)cpu;
#endif
}

void ThreadPool::check_stop() {
  if (shared_->caller == std::this_thread::get_id()) {
    shared_->check(stop_);
  } else if (shared_->stopped) {
    throw stopped();
  }
}

/** Whatever an executor does or leaves undone, the caller then takes part in what is left. */
void ThreadPool::ask_executor(int64_t count) {
  const Task task{[](void* shared) { static_cast<Shared*>(shared)->join(); }, shared_};
  try {
    executor_->run(std::min(count, threads_), task);
  } catch (...) {
  }
}

void ThreadPool::run(int64_t count, Work work, bool stops) {
  if (count <= 0) return;
  const StopCheck* stop = stops ? &stop_ : nullptr;
  Shared& shared = *shared_;
  const bool alone = threads_ == 1 || (workers_.empty() && !executor_);
  if (count == 1 || alone || this_process() != owner_process_) {
    shared.caller = std::this_thread::get_id();  // no worker is inside a task
    for (int64_t i = 0; i < count; ++i) {
      if (stops) stop_.check();
      work.call(work.self, i);
    }
    return;
  }
  shared.caller_cpu = this_cpu();
  if (shared.collided.exchange(false)) keep_off(shared.caller_cpu);
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    shared.work = work;
    shared.open = true;
    shared.count = count;
    shared.next.store(0);
    shared.failure = nullptr;
    shared.stopped = false;
    shared.caller = std::this_thread::get_id();
    shared.asked = stop;
    shared.round.fetch_add(1);
  }
  if (executor_) {
    ask_executor(count);
  } else {
    shared.wake.notify_all();
  }
  shared.take_part(stop);
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    shared.open = false;  // no worker joins from here on
  }
  // The others finish soon: who sleeps now wakes late, and maybe on another core.
  for (int spin = 0; spin < kSpins && shared.busy.load() != 0; ++spin) pause();
  std::unique_lock<std::mutex> lock(shared.mutex);
  const auto all_done = [&] { return shared.busy.load() == 0; };
  while (stops && stop_.possible() && !shared.stopped && !all_done()) {
    // A point of the system clock: waiting for a duration needs a newer C library.
    shared.done.wait_until(lock, std::chrono::system_clock::now() + kAskAgain, all_done);
    lock.unlock();
    const bool wanted = !all_done() && stop_.wanted();
    lock.lock();
    if (!wanted) continue;
    shared.stopped = true;
    if (!shared.failure) shared.failure = std::make_exception_ptr(stopped());
  }
  shared.done.wait(lock, all_done);
  if (shared.failure) std::rethrow_exception(shared.failure);
}

}  // namespace pariskv::cpu
