/**
 * Flags between the kernels of a step. A kernel starts while the one before is at work, and waits
 * for the blocks that write its inputs, not for the end of their kernel: an end is seen up to 2 us
 * late, and only when all blocks are done. The flags of a kv head lie in its scratch:
 *
 *   flag               set by                                      awaited by          cleared by
 *   word of `windows`  window: the thread that has the logit       score: one warp     attend
 *   `chunk_flags`      window: a block, a chunk of means summed    score: each warp    attend
 *   `scored`           score: a block, its share written           rerank: each block  attend
 *   `reranked`         rerank: a block, logits and masses written  attend: each block  attend
 *   `attended`         resident: a block, its parts written        attend: each block  attend
 *
 * The last two are set where `sets_flags` says so; elsewhere attend waits for the end of rerank,
 * which waits for the end of resident. The worth of a row depends on both. The tail has no flag:
 * attend sees that end while selected rows are on their way. A word of `windows` holds the logit
 * besides, and needs no fence.
 *
 * A flag that has the step's token is set. They are cleared because a graph is replayed with one
 * token. A block waits only for blocks that run already, so it cannot deadlock: a kernel starts
 * when all blocks of the one before have started. And no kernel ends before its predecessor: every
 * kernel that waits for flags also waits for the predecessor's end, in at least one block.
 */
#pragma once

#include "device/partition.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda {

/** The flags of a head's blocks. */
struct ReadyFlags {
  uint32_t* words;  // (kCount)

  static constexpr int kScored = 0, kReranked = device::kMostScoreBlocks;
  static constexpr int kAttended = kReranked + device::kSlices;
  static constexpr int kCount = kAttended + device::kParts;

  /** A block's flag: one of the above, plus its rank. All threads. */
  __device__ __forceinline__ void set(int flag, uint32_t token) const {
    device::store_release_after_block(words + flag, token);
  }
  /** Until so many blocks have scored. All threads; ends with a barrier. */
  __device__ __forceinline__ void await_scored(int blocks, uint32_t token) const {
    device::wait_for_flags(words + kScored, blocks, token);
  }
  /** Which blocks have by now, a bit each. By a warp. */
  __device__ __forceinline__ uint32_t scored(uint32_t token) const {
    static_assert(device::kMostScoreBlocks == 32, "a lane for each");
    return __ballot_sync(~0u, device::load_acquire(words + device::lane_id()) == token);
  }
  /** Until blocks of both kinds are done. All threads; ends with a barrier. */
  __device__ __forceinline__ void await_reranked(int blocks, int resident, uint32_t token) const {
    const int i = int(threadIdx.x) + kReranked;
    if (i < kReranked + blocks || (i >= kAttended && i < kAttended + resident)) {
      while (device::load_acquire(words + i) != token) {
      }
    }
    __syncthreads();
  }
  /** Thread `thread` of `threads` clears its share. */
  __device__ __forceinline__ void clear(int thread, int threads) const {
    for (int i = thread; i < kCount; i += threads) words[i] = 0;
  }
};

}  // namespace pariskv::cuda
