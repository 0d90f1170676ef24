#include "team.h"

#include <dlfcn.h>

#include <atomic>
#include <initializer_list>

namespace pariskv::ggml {

namespace {

/** How both runtimes start a parallel region: in all threads of a team, the caller among them. */
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

Parallel find_runtime() {
  if (void* address = dlsym(RTLD_DEFAULT, "GOMP_parallel")) {
    return reinterpret_cast<Parallel>(address);
  }
  for (const char* name : {"libgomp.so.1", "libomp.so.5", "libomp.so"}) {
    void* handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    void* address = handle != nullptr ? dlsym(handle, "GOMP_parallel") : nullptr;
    if (address != nullptr) return reinterpret_cast<Parallel>(address);
  }
  return nullptr;
}

class Team : public Executor {
 public:
  Team(Parallel parallel, int threads) : parallel_(parallel), threads_(threads) {}

  void run(int64_t times, const Task& task) override {
    struct Shared {
      const Task& task;
      std::atomic<int64_t> left;
    } shared{task, {times}};
    // Always the whole team: one of another size would be made anew each time.
    parallel_(
        [](void* data) {
          auto& own = *static_cast<Shared*>(data);
          if (own.left.fetch_sub(1) > 0) own.task();
        },
        &shared, unsigned(threads_), 0);
  }

 private:
  Parallel parallel_;
  int threads_;
};

}  // namespace

std::shared_ptr<Executor> openmp_team(int threads) {
  static const Parallel parallel = find_runtime();
  if (parallel == nullptr || threads < 2) return nullptr;
  return std::make_shared<Team>(parallel, threads);
}

}  // namespace pariskv::ggml
