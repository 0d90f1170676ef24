/** Statistics of a zone's keys, as policy/pariskv/codec/key_statistics.h lays them out. */
#pragma once

#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "policy/pariskv/codec/key_statistics.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cuda::device {

/** Statistics of the zone's keys for one head. */
struct HeadStatistics {
  const int64_t* usable;
  const int64_t* square_units;
  const int64_t* sums;    // (rotated dimensions); null: keys are told from the means of blocks
  const int32_t* counts;  // (subspaces, 256); null: none
};

/** As policy/pariskv/codec/key_statistics.h has them. */
__device__ __forceinline__ HeadStatistics statistics_of(const SummaryLayout& layout,
                                                        const void* state, int head) {
  const auto* numbers = static_cast<const int64_t*>(state);
  if (layout.block > 0) return {numbers + head, numbers + layout.kv_heads + head, nullptr, nullptr};
  const int64_t* sums = numbers + 2 * layout.kv_heads;
  const auto* counts =
      reinterpret_cast<const int32_t*>(sums + layout.kv_heads * layout.rotated_dim);
  return {numbers + head, numbers + layout.kv_heads + head, sums + head * layout.rotated_dim,
          counts + head * (layout.rotated_dim / kSubspaceDim) * 256};
}

/** The balance of a head, for queries: as policy/pariskv/codec/key_statistics.h has it. */
struct HeadBalance {
  const float* stretch;   // (key_dim); null: keys are encoded whole
  const int16_t* centre;  // (key_dim)
  const float* centre_step;
};

__device__ __forceinline__ HeadBalance balance_of(const SummaryLayout& layout, int64_t key_dim,
                                                  const void* state, int head) {
  if (layout.block == 0 || state == nullptr) return {};
  const BalancePlaces at = BalancePlaces::of(layout, key_dim);
  const auto* first = static_cast<const char*>(state);
  return {reinterpret_cast<const float*>(first + at.stretch) + head * key_dim,
          reinterpret_cast<const int16_t*>(first + at.centre) + head * key_dim,
          reinterpret_cast<const float*>(first + at.centre_step) + head};
}

/** The statistics that a score needs, in shared memory. */
template <int kWords, bool kBlocks>
struct KnownStatistics {
  alignas(16) int64_t sums[kBlocks ? 2 : 32 * kWords];  // not needed where there are blocks
  int64_t usable, square_units;

  /** Asks for it, by a warp; to be followed by a commit, a wait and a barrier. */
  __device__ __forceinline__ void stage(const HeadStatistics& statistics) {
    if constexpr (!kBlocks) {
      const auto* from = reinterpret_cast<const uint4*>(statistics.sums);
      const uint32_t to = shared_address(sums) + 16 * lane_id();
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        ptx::cp_async_cg_16(to + 32 * 16 * i, from + 32 * i + lane_id());
      }
    }
    if (lane_id() == 0) ptx::cp_async_ca(&usable, statistics.usable);
    if (lane_id() == 1) ptx::cp_async_ca(&square_units, statistics.square_units);
  }
};

}  // namespace pariskv::cuda::device
