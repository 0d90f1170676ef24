/**
 * A thread that takes pieces of memory from a resource while its owner does something else, one
 * after another. It begins with the first piece that is asked for and ends with this.
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
  /** No request is pending: each has been collected or taken back. */
  ~Ahead();
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  /** Asks for a piece; false: there is no thread. */
  bool ask(int64_t bytes);

  /** Whether to collect would not wait. */
  bool arrived() const;

  /**
   * The memory of the oldest request that was not collected; null: the resource has none, or this
   * is a fork's child.
   */
  void* collect();

  /** Takes back the requests that the thread has not begun, the newest ones: so many. */
  int64_t take_back();

  /** Gives memory back to the resource; false: there is no thread to do so. */
  bool give_back(void* data, int64_t bytes);

 private:
  struct Shared;
  static void serve(Shared& shared);

  const int64_t owner_process_;
  Shared* shared_;
  std::thread thread_;
};

}  // namespace pariskv
