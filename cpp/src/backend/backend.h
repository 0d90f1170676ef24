/**
 * A device that caches can live on: its computations (Verbs), its searches, its memory, the order
 * of its calls, and two services that only devices with memory of their own have. A new backend
 * implements these interfaces and gets a line in backend.cpp; docs/add-a-backend.md lists the
 * steps.
 */
#pragma once

#include <functional>
#include <memory>

#include "backend/memory.h"
#include "backend/offload.h"
#include "backend/order.h"
#include "backend/verbs.h"
#include "backend/word_updates.h"
#include "pariskv/config.h"
#include "pariskv/memory.h"
#include "search.h"

namespace pariskv {

/** How a backend differs from one that computes in place and at once. */
struct Capabilities {
  /** A verb may fail, or be stopped, after earlier ones of the same call: they must not change the
   * present state, so a search's state and remembered queries are copied before they change. */
  bool verbs_can_fail = false;
  /** Decodes can be recorded into graphs; Cache::advance prepares each replay. */
  bool graphs = false;
  /** decode writes the token's own row, so append need not come first. */
  bool decode_appends = false;
  /** The arena's memory is the device's: the host reaches it by fetch and copy alone. */
  bool own_memory = false;
};

class Backend : public Verbs, public BackendMemory, public CallOrder {
 public:
  virtual Capabilities capabilities() const { return {}; }

  /**
   * The search of Config::policy on this device, which outlives it. A backend that does not know
   * the policy attends to every zone in full.
   * @param config  resolved
   */
  virtual std::unique_ptr<Search> make_search(const Config& config, const ModelShape& shape);

  /** Null: verbs read the host's own views, so no tables are kept on the device. */
  virtual WordUpdates* word_updates() { return nullptr; }

  /** Calls `work(i)` for every i in [0, count) on the threads of the backend, if it has any. */
  virtual void parallel_for(int64_t count, const std::function<void(int64_t)>& work) {
    for (int64_t i = 0; i < count; ++i) work(i);
  }

  /** Null: rows stay where they are. */
  virtual Offloads* offloads() { return nullptr; }
};

/** Throws std::invalid_argument when this build has no backend for the device. */
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources);

namespace cpu {
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources);
}

namespace cuda {
bool is_built();
bool is_available();
std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources);
}  // namespace cuda

}  // namespace pariskv
