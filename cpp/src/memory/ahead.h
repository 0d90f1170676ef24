/**
 * A thread that takes a piece of memory from a resource while its owner does something else.
 * It begins with the first piece that is asked for and ends with this.
 */
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "pariskv/memory.h"

namespace pariskv {

class Ahead {
 public:
  Ahead(std::shared_ptr<MemoryResource> resource, int64_t alignment);
  /** No request is pending: the last one has been collected. */
  ~Ahead();
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  /** Asks for a piece, to be collected before the next one is; false: there is no thread. */
  bool ask(int64_t bytes);

  /** Whether to collect would not wait. */
  bool arrived() const;

  /** The memory of the request; null: the resource has none, or this is a fork's child. */
  void* collect();

 private:
  struct Shared;
  static void serve(Shared& shared);

  const int64_t owner_process_;
  Shared* shared_;
  std::thread thread_;
};

}  // namespace pariskv
