/**
 * Threads of the embedding program for the work of a cache on the CPU, in place of the cache's own:
 *
 *   class OnMyPool : public pariskv::Executor {
 *     void run(int64_t times, const pariskv::Task& task) override {
 *       my_pool.parallel_for(times, [&](int64_t) { task(); });
 *     }
 *   };
 *   pariskv::Resources resources;
 *   resources.executor = std::make_shared<OnMyPool>();
 *   pariskv::Cache cache(config, resources);
 *
 * Such a cache starts no threads. Results have the same bits on any executor.
 */
#pragma once

#include <cstdint>

#include "pariskv/export.h"

namespace pariskv {

/** A share of the work under way. Each call takes pieces of it until none are left. */
struct Task {
  using Call = void (*)(void* context);
  Call call;  ///< Throws nothing.
  void* context;

  void operator()() const { call(context); }
};

class PARISKV_API Executor {
 public:
  virtual ~Executor();

  /**
   * Calls the task some times, on as many threads as are free, and returns when these calls have
   * returned. The thread of `run` may make some of the calls, or all, one after the other. It may
   * make fewer of them, or throw: then the thread of the cache's call does what is left of the
   * work. A call that comes late, after `run`, does nothing or helps with later work; none may
   * come after the end of the cache.
   *
   * Caches that share an executor may be in `run` at the same time. It must not call a cache whose
   * work it does.
   *
   * @param times  at least 2, at most Config::threads: one for each thread that there is work for
   */
  virtual void run(int64_t times, const Task& task) = 0;
};

}  // namespace pariskv
