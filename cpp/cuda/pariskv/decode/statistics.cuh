/** Statistics of a zone's keys, as codec/key_statistics.h lays them out. */
#pragma once

#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "ops.h"

namespace pariskv::cuda::device {

/** Statistics of the zone's keys for one head. */
struct HeadStatistics {
  const int64_t* usable;
  const int64_t* square_units;
  const int64_t* sums;    // (rotated dimensions); null: keys are told from the means of blocks
  const int32_t* counts;  // (subspaces, 256); null: not kept
};

/** As codec/key_statistics.h has them. */
__device__ __forceinline__ HeadStatistics statistics_of(const ModelShape& model, const void* state,
                                                        int head) {
  const auto* numbers = static_cast<const int64_t*>(state);
  if (model.block > 0) return {numbers + head, numbers + model.kv_heads + head, nullptr, nullptr};
  const int64_t* sums = numbers + 2 * model.kv_heads;
  const auto* counts = reinterpret_cast<const int32_t*>(sums + model.kv_heads * model.rotated_dim);
  return {numbers + head, numbers + model.kv_heads + head, sums + head * model.rotated_dim,
          counts + head * (model.rotated_dim / kSubspaceDim) * 256};
}

/** The balance of a head's channels, (key_dim), as codec/key_statistics.h has it; null: none. */
__device__ __forceinline__ const float* stretch_of(const ModelShape& model, const void* state,
                                                   int head) {
  if (model.block == 0 || state == nullptr) return nullptr;
  const int64_t channels = model.kv_heads * model.rows.key_dim;
  const auto* squares = static_cast<const double*>(state) + 2 * model.kv_heads;
  return reinterpret_cast<const float*>(squares + channels) + head * model.rows.key_dim;
}

/** What is needed of the statistics, in shared memory. */
template <int kWords>
struct KnownStatistics {
  alignas(16) int64_t sums[32 * kWords];
  int64_t usable, square_units;

  /** Asks for it, by a warp; to be followed by a commit, a wait and a barrier. */
  __device__ __forceinline__ void stage(const HeadStatistics& statistics) {
    const auto* from = reinterpret_cast<const uint4*>(statistics.sums);
    const uint32_t to = shared_address(sums) + 16 * lane_id();
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {  // zeros where none are kept
      const auto* piece = from == nullptr ? nullptr : from + 32 * i + lane_id();
      ptx::cp_async_cg_16(to + 32 * 16 * i, piece, piece != nullptr);
    }
    if (lane_id() == 0) ptx::cp_async_ca(&usable, statistics.usable);
    if (lane_id() == 1) ptx::cp_async_ca(&square_units, statistics.square_units);
  }
};

}  // namespace pariskv::cuda::device
