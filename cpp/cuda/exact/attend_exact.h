/** The kernels of exact attention: which one a call is for. */
#pragma once

#include "pariskv/config.h"
#include "row_format.h"

namespace pariskv::cuda {

namespace device {
struct ExactParameters;
}

struct ExactKernel {
  void (*address)(device::ExactParameters);
  int threads;
  int queries;  // of a block
  int bytes;    // of shared memory
  int dims;     // of a state
  bool fills;   // a block leaves no room on its multiprocessor
};

/** The kernel for any number of queries. Each dtype has a file of its own, to compile side by side.
 */
template <typename Element>
ExactKernel exact_kernel(const RowFormat& rows);

/**
 * The kernel for many queries on compute capability 9.0: a null address where it does not serve
 * such rows. It has a file of its own, which is compiled for 9.0a alone.
 */
ExactKernel hopper_kernel_of(const RowFormat& rows, Precision precision);

}  // namespace pariskv::cuda
