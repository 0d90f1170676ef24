/** Barriers in shared memory (mbarrier) that count arrivals, and bytes on their way. */
#pragma once

#include "device/ptx.cuh"

namespace pariskv::cuda::device {

/** Waits for the end of the phase with this parity: 0 the first, 1 the second, 0 the third. */
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

}  // namespace pariskv::cuda::device
