/** Leaving the GIL around a call into the engine. */
#pragma once

#include <nanobind/nanobind.h>

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

 private:
  PyThreadState* state_;  // null: the GIL was kept
};

/**
 * To be called as the interpreter begins to shut down: afterwards no other thread asks for the
 * GIL on its way out of the engine.
 */
void close_the_door();

}  // namespace pariskv::python
