/**
 * What kernels that run at the same time tell one another: programmatic dependent launch, and flags
 * in global memory by release and acquire. Which flags the kernels of a decode step have is in
 * pariskv/decode/flags.cuh.
 */
#pragma once

#include "device/ptx.cuh"

namespace pariskv::cuda::device {

/** A kernel that was launched early waits here for the work of the one before it. */
__device__ __forceinline__ void wait_for_predecessor() { ptx::griddepcontrol_wait(); }
/** Lets the next kernel take its place on the device; it waits for our work by itself. */
__device__ __forceinline__ void let_successor_start() { ptx::griddepcontrol_launch_dependents(); }

/** What this thread has written, or knows to be written, is visible to the flag's readers. */
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  ptx::st_release_gpu(flag, value);
}
/** The same for all that the block has written. By all threads. */
__device__ __forceinline__ void store_release_after_block(uint32_t* flag, uint32_t value) {
  __syncthreads();
  if (threadIdx.x == 0) store_release(flag, value);
}
/** Pairs with store_release. */
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  return ptx::ld_acquire_gpu(flag);
}

/** Waits until `count` flags have this value, a thread each. By all threads; ends with a barrier.
 */
__device__ __forceinline__ void wait_for_flags(const uint32_t* flags, int count, uint32_t value) {
  if (int(threadIdx.x) < count) {
    while (load_acquire(flags + threadIdx.x) != value) {
    }
  }
  __syncthreads();
}

/** A flag and a value in one word, which is all that its reader learns. */
__device__ __forceinline__ void store_relaxed(uint64_t* word, uint32_t flag, int value) {
  ptx::st_relaxed_gpu(word, uint64_t{flag} << 32 | uint32_t(value));
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* word) {
  return ptx::ld_relaxed_gpu(word);
}

}  // namespace pariskv::cuda::device
