#include "unlocked.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "pariskv/error.h"

namespace pariskv::python {

namespace {

std::atomic<bool> closing{false};
std::atomic<int64_t> returning{0};  // threads that wait for the GIL to come back to Python
std::thread::id closer;             // who shuts Python down; written before `closing`

bool must_wait() { return closing.load() && std::this_thread::get_id() != closer; }

// Python's own, where signals are answered; another one after a fork in another thread.
std::atomic<unsigned long> main_thread{0};
thread_local Unlocked* innermost = nullptr;

// Ctrl-C is answered within twice this and the piece of work that is being done.
constexpr std::chrono::milliseconds kBetweenSignals{30};

[[noreturn]] void wait_for_the_end() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

void close_the_door() {
  closer = std::this_thread::get_id();
  closing.store(true);
  PyThreadState* state = PyEval_SaveThread();
  while (returning.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  PyEval_RestoreThread(state);
}

void note_main_thread(unsigned long thread) { main_thread = thread; }

Unlocked::Unlocked()
    : state_(PyEval_SaveThread()),
      outer_(innermost),
      next_(std::chrono::steady_clock::now() + kBetweenSignals) {
  if (must_wait()) wait_for_the_end();
  innermost = this;
}

Unlocked::~Unlocked() {
  innermost = outer_;
  come_back();
}

void Unlocked::come_back() {
  returning.fetch_add(1);
  if (must_wait()) {
    returning.fetch_sub(1);
    wait_for_the_end();
  }
  PyEval_RestoreThread(state_);
  returning.fetch_sub(1);
}

bool Unlocked::signal_raised() { return innermost != nullptr && innermost->ask(); }

bool Unlocked::ask() {
  if (raised_) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_ || PyThread_get_thread_ident() != main_thread) return false;
  come_back();
  if (PyErr_CheckSignals() != 0) {
    try {
      throw nanobind::python_error();
    } catch (...) {
      raised_ = std::current_exception();
    }
  }
  state_ = PyEval_SaveThread();
  next_ = std::chrono::steady_clock::now() + kBetweenSignals;
  return bool(raised_);
}

void Unlocked::call_python(const std::function<void()>& call) {
  Unlocked& own = *innermost;
  own.come_back();
  try {
    call();
  } catch (...) {
    own.raised_ = std::current_exception();
  }
  own.state_ = PyEval_SaveThread();
  if (own.raised_) throw Stopped("a function that the call was given has raised");
}

}  // namespace pariskv::python
