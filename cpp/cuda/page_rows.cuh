/** Rows of a page table, filled from a sequence's own table of segments. */
#pragma once

#include <cstdint>

#include "page_fill.h"

namespace pariskv::cuda::device {

/**
 * All threads of a block, of which there are so many: the numbers of the pages that have so many
 * tokens. False: not all of them have numbers, or the row is too short.
 */
__device__ __forceinline__ bool fill_page_row(const PageFill& fill, int64_t row, int64_t tokens,
                                              uint32_t segment_tokens, void* const* segments,
                                              int threads) {
  const int64_t count = (tokens + segment_tokens - 1) / segment_tokens;
  if (count > fill.width) return false;
  int32_t* const pages = fill.pages + row * fill.width;
  bool all = true;
  for (int64_t i = int(threadIdx.x); i < count; i += threads) {
    const int64_t at = static_cast<const char*>(segments[i]) - fill.first;
    const bool there = at >= 0 && at < fill.range_bytes;
    if (there) pages[i] = int32_t(at / fill.page_bytes);
    all = all && there;
  }
  return !__syncthreads_or(!all);
}

}  // namespace pariskv::cuda::device
