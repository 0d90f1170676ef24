/**
 * Where bytes come from.
 *
 * The library draws all its large memory from a MemoryResource through an arena
 * of its own, which adds slabs, a budget, counters, and zeroes on free. An
 * embedder that has a memory manager derives from MemoryResource and passes it in:
 *
 *   pariskv::Resources resources;
 *   resources.host = std::make_shared<MyPool>();
 *   pariskv::Cache cache(config, resources);
 *
 * A resource is called from inside the cache's calls: it must not call the cache back. A cache on
 * a GPU that was given none also takes memory ahead of need, on a thread that ends with the cache.
 *
 * A cache on a GPU takes blocks of up to 64 MB from two resources, device memory and host memory
 * that the device can read, and keeps what it no longer needs for later: giving it back makes CUDA
 * wait for the device. Cache::trim does that when asked.
 */
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "pariskv/executor.h"
#include "pariskv/export.h"

namespace pariskv {

class PARISKV_API MemoryResource {
 public:
  virtual ~MemoryResource() = default;

  /**
   * @param bytes      more than 0
   * @param alignment  a power of two
   * @return writable memory, or nullptr when there is none (throwing
   *         std::bad_alloc says the same)
   */
  virtual void* allocate(std::size_t bytes, std::size_t alignment) = 0;

  /** Takes back a block that `allocate` gave for the same `bytes` and `alignment`. */
  virtual void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept = 0;
};

/** The process heap: the default of a cache on the CPU. */
PARISKV_API std::shared_ptr<MemoryResource> heap_resource();

/** What an embedding program lends a cache; an empty pointer means the library's own memory. */
struct Resources {
  std::shared_ptr<MemoryResource> host;    ///< Memory of a cache on the CPU.
  std::shared_ptr<MemoryResource> device;  ///< Of the config's device: cudaMalloc and its like.
  /** Host memory that the device can read. Where it is mapped in small pages rows come slowly. */
  std::shared_ptr<MemoryResource> pinned;
  /**
   * Asked between the pieces of a long call, on the thread that made the call; once it says true
   * the call throws Stopped. Pieces take milliseconds, so it may be asked often and has to be
   * quick. It must not throw, nor call the cache: such a call is refused. Not asked by `remove`,
   * the end of a cache, and work that a GPU does by itself; nor while an executor works on other
   * threads alone.
   */
  std::function<bool()> should_stop;
  /** Threads for the work of a cache on the CPU; null: the cache starts its own. */
  std::shared_ptr<Executor> executor;
};

/** An arena's books, in bytes. */
struct MemoryUse {
  int64_t live = 0;      ///< Handed out and not given back.
  int64_t peak = 0;      ///< The most that was ever live.
  int64_t reserved = 0;  ///< Held from the resource: live bytes and the unused rest of slabs.
  int64_t budget = 0;    ///< The most that may be reserved; 0 is no limit.
  int64_t coming = 0;    ///< Of `reserved`: not there yet, a thread is taking it.
};

}  // namespace pariskv
