/**
 * Flags between the kernels of a step. A kernel starts while the one before is at work, and waits
 * for the blocks whose results it reads, not for the end of their kernel: an end is seen up to 2 us
 * late, and only when all blocks are done. The flags of a kv head lie in its scratch:
 *
 *   flag               set by                                      awaited by          cleared by
 *   word of `windows`  window: the thread that has the logit       score: one warp     attend
 *   `chunk_flags`      window: a block, a chunk of means summed    score: each warp    attend
 *   `scored`           score: a block, its share written           rerank: each block  attend
 *   `reranked`         rerank: a block, logits and masses written  attend: each block  attend
 *
 * `reranked` is set where `RerankParams::sets_flags`; elsewhere attend waits for the end of rerank
 * before it selects. What the kernel of the resident rows leaves is read after the end of rerank,
 * which waits for that kernel: attend sees it while selected rows are on their way. A word of
 * `windows` holds the logit besides, and needs no fence.
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

  static constexpr int kCount = device::kMostScoreBlocks + device::kSlices;

  /** Block `block` has scored its share. All threads. */
  __device__ __forceinline__ void set_scored(int block, uint32_t token) const {
    device::store_release_after_block(words + block, token);
  }
  /** Until `blocks` blocks have. All threads; ends with a barrier. */
  __device__ __forceinline__ void await_scored(int blocks, uint32_t token) const {
    device::wait_for_flags(words, blocks, token);
  }
  /** Which blocks have by now, a bit each. By a warp. */
  __device__ __forceinline__ uint32_t scored(uint32_t token) const {
    static_assert(device::kMostScoreBlocks == 32, "a lane for each");
    return __ballot_sync(~0u, device::load_acquire(words + device::lane_id()) == token);
  }

  /** The same of blocks that rerank. */
  __device__ __forceinline__ void set_reranked(int block, uint32_t token) const {
    device::store_release_after_block(words + device::kMostScoreBlocks + block, token);
  }
  __device__ __forceinline__ void await_reranked(int blocks, uint32_t token) const {
    device::wait_for_flags(words + device::kMostScoreBlocks, blocks, token);
  }

  /** Thread `thread` of `threads` clears its share. */
  __device__ __forceinline__ void clear(int thread, int threads) const {
    for (int i = thread; i < kCount; i += threads) words[i] = 0;
  }
};

}  // namespace pariskv::cuda
