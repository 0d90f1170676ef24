#include "unlocked.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace pariskv::python {

namespace {

std::atomic<bool> closing{false};
std::atomic<int64_t> returning{0};  // threads that wait for the GIL to come back to Python
std::thread::id closer;             // who shuts Python down; written before `closing`

bool must_wait() { return closing.load() && std::this_thread::get_id() != closer; }

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

Unlocked::Unlocked() : state_(PyEval_SaveThread()) {
  if (must_wait()) wait_for_the_end();
}

Unlocked::~Unlocked() {
  returning.fetch_add(1);
  if (must_wait()) {
    returning.fetch_sub(1);
    wait_for_the_end();
  }
  PyEval_RestoreThread(state_);
  returning.fetch_sub(1);
}

}  // namespace pariskv::python
