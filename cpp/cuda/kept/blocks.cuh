/** Kept rows and recent queries of one head, as device code finds them: kept.h and recent.h. */
#pragma once

#include <cstdint>

#include "kept.h"
#include "recent.h"

namespace pariskv::cuda::device {

/** Kept rows of a kv head. */
struct KeptHead {
  char* block;
  KeptLayout layout;
  int head;

  __device__ __forceinline__ int32_t* counts() const {
    return reinterpret_cast<int32_t*>(block) + head * 2;
  }
  __device__ __forceinline__ int32_t* positions() const {
    return reinterpret_cast<int32_t*>(block + layout.positions_offset()) + head * layout.capacity;
  }
  __device__ __forceinline__ uint8_t* ages() const {
    return reinterpret_cast<uint8_t*>(block + layout.ages_offset()) + head * layout.capacity;
  }
  __device__ __forceinline__ char* row(int i) const {
    return block + layout.rows_offset() + (head * layout.capacity + i) * layout.row_bytes;
  }
};

/** The query of one position and head. */
struct RecentQueryPlace {
  int64_t* position;
  RecentScale* scale;
  int8_t* numbers;
};

/** Of a head of queries, where a position's is remembered. */
__device__ __forceinline__ RecentQueryPlace recent_place(const RecentLayout& layout, char* block,
                                                         int64_t position, int query_head) {
  const int slot = int(position) % int(layout.slots);  // quicker than with 64 bits
  const int64_t row = slot * layout.query_heads + query_head;
  return {reinterpret_cast<int64_t*>(block) + slot,
          reinterpret_cast<RecentScale*>(block + layout.scales_offset()) + row,
          reinterpret_cast<int8_t*>(block + layout.numbers_offset()) + row * layout.key_dim};
}

}  // namespace pariskv::cuda::device
