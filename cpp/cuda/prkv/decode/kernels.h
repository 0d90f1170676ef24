/** The kernels of a step over pages for one dtype and width. */
#pragma once

#include "launch.h"
#include "prkv/decode/params.h"

namespace pariskv::cuda {

struct PageKernels {
  Kernel<PageScoreParams> score;
  Kernel<PageAttendParams> attend;
  Kernel<PageMergeParams> merge;
  int attend_least;  // bytes of shared memory that attend needs
};

/** By the dimensions of keys: see dispatch_words. */
template <typename Element>
PageKernels page_kernels(int64_t key_dim);

}  // namespace pariskv::cuda
