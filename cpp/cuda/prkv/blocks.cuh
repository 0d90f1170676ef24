/** Digests of pages, whole and amended ones, as device code finds them: policy/prkv/pages.h. */
#pragma once

#include <cstdint>

#include "policy/prkv/pages.h"

namespace pariskv::cuda::device {

/** Where the numbers of a page are. */
struct PageNumbers {
  uint64_t* live;
  float* unit;
  uint16_t* digest;  // (2, key_dim)
};

/** A page of a head in a block of digests. */
__device__ __forceinline__ PageNumbers page_numbers(const PageLayout& layout, char* block, int head,
                                                    int page) {
  const int64_t i = head * layout.pages + page;
  return {reinterpret_cast<uint64_t*>(block) + i,
          reinterpret_cast<float*>(block + layout.units_offset()) + i,
          reinterpret_cast<uint16_t*>(block + layout.digests_offset()) + i * 2 * layout.key_dim};
}

/** Behind the kept rows of a block: the split of the budget, and a head's amended pages. */
struct AmendedHead {
  char* block;
  AmendedLayout layout;
  int head;

  __device__ __forceinline__ PRKVSplit* split() const {
    return reinterpret_cast<PRKVSplit*>(block + layout.begin);
  }
  __device__ __forceinline__ int64_t* count() const {
    return reinterpret_cast<int64_t*>(split() + 1) + head;
  }
  /** Of each page, ascending. */
  __device__ __forceinline__ int64_t* numbers() const {
    return reinterpret_cast<int64_t*>(split() + 1) + layout.heads + head * layout.capacity;
  }
  __device__ __forceinline__ PageNumbers page(int i) const {
    return page_numbers(layout.pages(), block + layout.begin + layout.pages_offset(), head, i);
  }
};

}  // namespace pariskv::cuda::device
