/** The kernels of a step over pages, of one dtype: included where they are compiled. */
#pragma once

#include "elements.h"
#include "prkv/decode/attend/kernel.cuh"
#include "prkv/decode/kernels.h"
#include "prkv/decode/merge/kernel.cuh"
#include "prkv/decode/score/kernel.cuh"

namespace pariskv::cuda {

template <typename Element>
PageKernels page_kernels(int64_t key_dim) {
  return dispatch_words(key_dim, [](auto words) {
    constexpr int kWords = int(decltype(words)::kValue);
    return PageKernels{score_pages<Element>, attend_pages<Element, kWords>, merge_pages<Element>,
                       AttendPages<Element, kWords>::kSpaceBytes + device::kMergeBytes<kWords> +
                           2 * device::kTileBytes};
  });
}

}  // namespace pariskv::cuda
