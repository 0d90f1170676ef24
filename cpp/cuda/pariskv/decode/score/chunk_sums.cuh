/** The logits of a zone's blocks of keys in all, from the sums that window_logits leaves by chunks. */
#pragma once

#include "codec/head_scale.h"
#include "device/ptx.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda {

/** Until the sums of all chunks are there. By a warp. */
__device__ __forceinline__ void await_chunks(const uint32_t* flags, int chunks, uint32_t token) {
  for (int i = device::lane_id(); i < chunks; i += 32) {
    while (device::load_acquire(flags + i) != token) {
    }
  }
  __syncwarp();
}

/** The sums of a searcher over all chunks, `pitch` apart: in lane 0. By a warp. */
__device__ __forceinline__ BlockSums sum_chunks(const BlockSums* of, int chunks, int pitch) {
  BlockSums all{};
  int most = all.most;
  for (int i = device::lane_id(); i < chunks; i += 32) {
    most = max(most, __ldcg(&of[int64_t(i) * pitch].most));
  }
  all.most = __reduce_max_sync(~0u, most);
  for (int i = device::lane_id(); i < chunks; i += 32) {
    const BlockSums& chunk = of[int64_t(i) * pitch];
    all.blocks += __ldcg(&chunk.blocks);
    all.sum += __ldcg(&chunk.sum);
    all.squares += __ldcg(&chunk.squares);
    all.weight += BlockSums::lowered(__ldcg(&chunk.weight), all.most - __ldcg(&chunk.most));
  }
  all.blocks = device::warp_sum(all.blocks);
  all.sum = device::warp_sum(all.sum);
  all.squares = device::warp_sum(all.squares);
  all.weight = device::warp_sum(all.weight);
  return all;
}

}  // namespace pariskv::cuda
