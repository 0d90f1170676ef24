/** The logits of a zone's blocks of keys in all, from the sums that window_logits leaves by chunks.
 */
#pragma once

#include "codec/head_scale.h"
#include "device/ptx.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** Sums over the blocks of a chunk, of which there are at most 64: as BlockSums. */
struct alignas(16) ChunkSums {
  int32_t sum, most, weight, unused;
  int64_t squares, unused_too;
};

/** Chunks of a lane that are looked at together. */
constexpr int kChunksAtOnce = 4;

/** Until the sums of all chunks are there. By a warp. */
__device__ __forceinline__ void await_chunks(const uint32_t* flags, int chunks, uint32_t token) {
#pragma unroll 1
  for (int first = lane_id(); first < chunks; first += 32 * kChunksAtOnce) {
    uint32_t found[kChunksAtOnce];
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      found[i] = first + 32 * i < chunks ? load_acquire(flags + first + 32 * i) : token;
    }
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      while (found[i] != token) found[i] = load_acquire(flags + first + 32 * i);
    }
  }
  __syncwarp();
}

/**
 * The sums of a searcher over all chunks: in every lane. By a warp.
 * @param of     of the first chunk; `pitch` from chunk to chunk
 * @param count  of blocks of keys
 */
__device__ __forceinline__ BlockSums sum_chunks(const ChunkSums* of, int chunks, int pitch,
                                                int64_t count) {
  BlockSums all{};
  int most = all.most;
#pragma unroll 4
  for (int i = lane_id(); i < chunks; i += 32) {
    most = max(most, __ldcg(&of[int64_t(i) * pitch].most));
  }
  all.most = __reduce_max_sync(~0u, most);
#pragma unroll 4
  for (int i = lane_id(); i < chunks; i += 32) {
    const ChunkSums& chunk = of[int64_t(i) * pitch];
    const int4 numbers = __ldcg(reinterpret_cast<const int4*>(&chunk));
    all.squares += __ldcg(&chunk.squares);
    all.sum += numbers.x;
    all.weight += BlockSums::lowered(numbers.z, all.most - numbers.y);
  }
  all.blocks = count;
  all.sum = warp_sum(all.sum);
  all.squares = warp_sum(all.squares);
  all.weight = warp_sum(all.weight);
  return all;
}

}  // namespace pariskv::cuda::device
