/** Leaving the GIL around a call into the engine. */
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <exception>
#include <functional>

namespace pariskv::python {

/**
 * Like nanobind's gil_scoped_release, but safe in a daemon thread that is inside a call while
 * the interpreter shuts down: Python would end such a thread by unwinding it, which C++ answers
 * with std::terminate. It is left waiting instead, as Python 3.14 does itself.
 */
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  /**
   * For Resources::should_stop: runs the handlers of signals that have come, a few times a second.
   * True when one raised, as Ctrl-C's does; `raised` then has what.
   */
  static bool signal_raised();
  const std::exception_ptr& raised() const { return raised_; }

  /**
   * For what the engine calls back inside a call: calls Python, with the GIL. When that raises,
   * `raised` has what, and this throws Stopped, so that the call ends.
   */
  static void call_python(const std::function<void()>& call);

 private:
  bool ask();
  void come_back();

  PyThreadState* state_;
  Unlocked* const outer_;
  std::chrono::steady_clock::time_point next_;  // not asked before
  std::exception_ptr raised_;
};

/** Notes the thread where Python runs the handlers of signals, by Python's number for it. */
void note_main_thread(unsigned long thread);

/**
 * To be called as the interpreter begins to shut down: afterwards no other thread asks for the
 * GIL on its way out of the engine.
 */
void close_the_door();

}  // namespace pariskv::python
