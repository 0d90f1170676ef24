/** A block that grows when asked, cut up anew for every call. */
#pragma once

#include "memory/arena.h"
#include "pariskv/error.h"

namespace pariskv {

class Workspace {
 public:
  /** Afterwards `bytes` can be taken. What was taken before is gone. */
  void reserve(int64_t bytes, Arena& arena) {
    if (bytes <= block_.bytes()) return;
    release();  // first, so that old and new are never held together
    try {
      block_ = arena.allocate(bytes + bytes / 8);  // a growing zone asks a little more each time
    } catch (const OutOfMemory&) {
      block_ = arena.allocate(bytes);
    }
  }

  void release() noexcept { block_ = Block(); }

  int64_t bytes() const { return block_.bytes(); }
  char* data() const { return block_.as<char>(); }

 private:
  Block block_;
};

/**
 * Walks through a workspace handing out arrays. Over a null base it only adds up, so the
 * same code that cuts also measures.
 */
class Cutter {
 public:
  explicit Cutter(char* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    const int64_t bytes = count * int64_t(sizeof(T));
    bytes_ += (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace pariskv
