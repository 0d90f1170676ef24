/**
 * The library's allocator: slabs for small blocks, whole blocks for large ones, one
 * budget and one set of books. A block is zeroed when it is given back, before anybody
 * else can be handed its bytes.
 */
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "pariskv/memory.h"

namespace pariskv {

class Arena;
struct Slab;

/** Owned bytes; gives itself back. Empty when default-made or moved from. */
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    Block(std::move(other)).swap(*this);
    return *this;
  }
  ~Block();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  friend class Arena;
  void swap(Block& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(slab_, other.slab_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  Arena* arena_ = nullptr;
  Slab* slab_ = nullptr;  // null: taken from the resource on its own
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

class Arena {
 public:
  /** @param budget the most bytes to hold from `resource` at a time; 0 is no limit. */
  Arena(std::shared_ptr<MemoryResource> resource, int64_t budget);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /**
   * `bytes` (0 or more) of uninitialised memory, aligned to kAlignment.
   * Throws OutOfMemory and changes nothing when the budget or the resource says no.
   */
  Block allocate(int64_t bytes);

  MemoryUse use() const;

  static constexpr int64_t kAlignment = 64;

 private:
  friend class Block;
  void* take(int64_t bytes);
  void give_back(void* data, int64_t bytes) noexcept;
  void free(Block& block) noexcept;
  Slab* slab_with_room(int64_t block_bytes);

  std::shared_ptr<MemoryResource> resource_;
  mutable std::mutex mutex_;
  MemoryUse use_;
  std::map<int64_t, std::vector<std::unique_ptr<Slab>>> slabs_;  // by block size
};

}  // namespace pariskv
