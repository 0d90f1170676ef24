/** Calls on one cache take turns. Waiting for one's turn can be stopped. */
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "check.h"
#include "process.h"
#include "stop.h"

namespace pariskv {

class Turns {
 public:
  void take(const StopCheck& stop) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (taken_ && owner_ == std::this_thread::get_id()) {
      fail(
          "this thread is inside a call on this cache, so a second one would wait for itself: "
          "handlers of signals, should_stop, memory resources and dense must not call it");
    }
    while (taken_) {
      if (process_ != this_process()) {
        fail(
            "this process was forked while another thread was inside a call on this cache, so it "
            "is half changed here: make a new one, or fork when no call is under way");
      }
      if (!stop.possible()) {
        free_.wait(lock);
        continue;
      }
      // A point of the system clock: waiting for a duration needs a newer C library.
      free_.wait_until(lock, std::chrono::system_clock::now() + kWait);
      if (!taken_) break;
      lock.unlock();  // what is asked may take a while, and may end the call
      stop.check();
      lock.lock();
    }
    taken_ = true;
    owner_ = std::this_thread::get_id();
    process_ = this_process();
  }

  void pass_on() noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      taken_ = false;
    }
    free_.notify_one();
  }

 private:
  static constexpr std::chrono::milliseconds kWait{20};

  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
  std::thread::id owner_;
  int64_t process_ = 0;
};

}  // namespace pariskv
