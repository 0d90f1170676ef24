/** What an arena takes from its resource at a time. */
#pragma once

#include <cstdint>
#include <vector>

namespace pariskv {

// A device maps memory for some 30 microseconds a megabyte, and copies meanwhile may have to
// wait for it: a piece that is taken beside steps has to be short beside them.
constexpr int64_t kAheadSlab = int64_t{16} << 20;

/** One piece of the resource, cut into equal blocks. */
struct Slab {
  char* data = nullptr;
  int64_t bytes = 0;
  int64_t block_bytes = 0;
  std::vector<int32_t> free;  // indices of free blocks; capacity never grows after making
  int64_t blocks = 0;
  bool held = false;                         // until trimmed, whether it is in use or not
  size_t number = 0;                         // among those of its shelf
  Slab *before = nullptr, *after = nullptr;  // among those of its shelf with free blocks

  bool unused() const { return int64_t(free.size()) == blocks; }
};

}  // namespace pariskv
