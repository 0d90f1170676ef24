/**
 * Flags between the kernels of a step. A kernel starts while the one before is at work, and waits
 * for the blocks whose results it reads, not for the end of their kernel: an end is seen up to 2 us
 * late, and only when all blocks are done. The flags of a kv head lie in its scratch:
 *
 * | flag | set by | awaited by |
 * | --- | --- | --- |
 * | a row of `windows` | window kernel, with the logit in the same word | scan: the warp that sums
 * | | `scanned`, a block | scan, when its scores and counts are written | estimate: every block |
 * | `estimated`, a block | estimate, when its logits and masses are written and the kernel of
 * the resident rows has ended; only where a launch has `ready_flags` | take: every block |
 *
 * A flag that has the step's token is set. The last kernel clears all of them: a graph is replayed
 * with one token.
 *
 * A block waits only for blocks that run already, so it cannot deadlock: a kernel starts when all
 * blocks of the one before have started. And no kernel ends before its predecessor: every kernel
 * that waits for flags also waits for the predecessor's end, in at least one block.
 */
#pragma once

#include "device/select.cuh"
#include "device/signal.cuh"

namespace pariskv::cuda {

/** The flags of a head's blocks. */
struct ReadyFlags {
  uint32_t* words;  // (kCount)

  static constexpr int kCount = device::kMostScans + device::kSlices;

  /** A block of the scan has left all it has to. All threads. */
  __device__ __forceinline__ void set_scanned(int block, uint32_t token) const {
    device::store_release_after_block(words + block, token);
  }
  /** Until all blocks of the scan have. All threads; ends with a barrier. */
  __device__ __forceinline__ void await_scanned(int blocks, uint32_t token) const {
    device::wait_for_flags(words, blocks, token);
  }
  /** Which of them have by now, a bit each. By a warp. */
  __device__ __forceinline__ uint32_t scanned(uint32_t token) const {
    static_assert(device::kMostScans == 32, "a lane for each");
    return __ballot_sync(~0u, device::load_acquire(words + device::lane_id()) == token);
  }

  /** The same of blocks that estimate. */
  __device__ __forceinline__ void set_estimated(int block, uint32_t token) const {
    device::store_release_after_block(words + device::kMostScans + block, token);
  }
  __device__ __forceinline__ void await_estimated(int blocks, uint32_t token) const {
    device::wait_for_flags(words + device::kMostScans, blocks, token);
  }

  /** Thread `thread` of `threads` clears its share. */
  __device__ __forceinline__ void clear(int thread, int threads) const {
    for (int i = thread; i < kCount; i += threads) words[i] = 0;
  }
};

}  // namespace pariskv::cuda
