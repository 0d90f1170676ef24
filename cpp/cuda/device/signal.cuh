/**
 * Flags in global memory, for kernels of one decode step that run at the same time. A later kernel
 * starts early (programmatic dependent launch) and waits for the flags of its own head, not for the
 * end of the kernel that sets them. Every kv head of every sequence has flags of its own, in its
 * scratch:
 *
 *   flag           how many             writer           reader           cleared by
 *   scan flag      one a scan block     scan_kernel      estimate_kernel  take_kernel
 *   estimate flag  one an estimate      estimate_kernel  take_kernel      take_kernel
 *                  block
 *   window word    (group,              window_kernel    scan_kernel      take_kernel
 *                  kWindowRows)
 *
 * - Set means: the flag is the step's token, a number that the host changes with every decode and
 *   that is never 0. A replay of a captured step has the same token again, which is why take_kernel
 *   stores zeros. By then its cluster has exchanged messages, so all of its blocks have seen the
 *   estimate flags; and estimates are set after scan flags and window words have been read.
 * - Scan flag: the block's scores and histogram are written. estimate_kernel looks at it once when
 *   it starts, and waits for it if it has to before it selects candidates. Without a scan in the
 *   same decode it waits for the kernel before instead.
 * - Estimate flag: the block's estimates are written, and by the time that all blocks of the head
 *   have set theirs, its attention to resident rows as well. Used where each processor has one
 *   block that estimates beside blocks of other kernels (`roomy`); elsewhere take_kernel waits for
 *   the kernel before.
 * - Window word: 64 bits, the token above and a row's logit below, so that one relaxed load brings
 *   both and nothing else has to be ordered.
 *
 * This cannot deadlock: a kernel starts only when all blocks of the kernels before it have started
 * (they call let_successor_start), so a block waits only for blocks that are running or have ended.
 */
#pragma once

#include "device/ptx.cuh"

namespace pariskv::cuda::device {

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
