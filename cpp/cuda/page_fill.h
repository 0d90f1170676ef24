/** What kernels know of a page table. */
#pragma once

#include <cstdint>

#include "paged.h"

namespace pariskv::cuda {

/** A page table's rows, as kernels fill them. */
struct PageFill {
  const char* first;  // page 0; null: nothing is filled
  int64_t page_bytes;
  int64_t range_bytes;
  int32_t* pages;    // (rows, width)
  int32_t* lengths;  // (rows)
  int64_t width;

  static PageFill of(const PagedRows& paged) {
    return {paged.range.data, paged.range.page_bytes, paged.range.count * paged.range.page_bytes,
            paged.pages,      paged.lengths,          paged.width};
  }
};

}  // namespace pariskv::cuda
