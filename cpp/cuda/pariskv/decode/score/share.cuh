/** A block's share of a head's zone, cut into units of its warps: by signs and by votes alike. */
#pragma once

#include "pariskv/decode/context.cuh"
#include "pariskv/decode/flags.cuh"
#include "pariskv/decode/score/counts.cuh"
#include "pariskv/decode/score/ring.cuh"

namespace pariskv::cuda {

namespace device {

/** Turns histograms of all warps into counts; they are overwritten. */
__device__ __forceinline__ void write_counts(uint32_t (&histograms)[kWarps][256],
                                             ScoreCounts* out) {
  auto* mine = reinterpret_cast<int4*>(&histograms[warp_id()][8 * lane_id()]);
  const int4 low = mine[0], high = mine[1];
  int of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 6; i >= 0; --i) of[i] += of[i + 1];
  const int higher = __reduce_add_sync(~0u, of[0]) - lanes_before(of[0]) - of[0];
#pragma unroll
  for (int i = 0; i < 8; ++i) of[i] += higher;
  auto* to = reinterpret_cast<int4*>(&out->of_warps[warp_id()][8 * lane_id()]);
  to[0] = mine[0] = make_int4(of[0], of[1], of[2], of[3]);
  to[1] = mine[1] = make_int4(of[4], of[5], of[6], of[7]);
  __syncthreads();
  static_assert(kThreads == 256);
  const int bin = int(threadIdx.x);
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += int(histograms[warp][bin]);
  out->at_least[bin] = sum;
  if (bin % kFine == 0) out->coarse[bin / kFine] = sum;
}

}  // namespace device

/** In shared memory; stages of all warps come besides. */
template <int kWords>
struct ShareSpace {
  uint64_t barriers[device::kWarps][device::kStages<kWords>];
  alignas(16) uint32_t histogram[device::kWarps][256];

  static constexpr int kWarpBytes = device::kStages<kWords> * device::kUnitBytes<kWords>;
  static constexpr int kStageBytes = device::kWarps * kWarpBytes;

  /** All threads; to be followed by a barrier. */
  __device__ __forceinline__ void clear() {
    static_assert(device::kThreads == 256);
#pragma unroll
    for (auto& counts : histogram) counts[threadIdx.x] = 0;
  }
};

template <int kWords>
struct Share {
  const HeadContext& context;
  ShareSpace<kWords>& space;
  int begin, end;  // units of this warp
  device::Ring<kWords> ring;

  /** Of block `rank` of `blocks`; the first units set out. */
  __device__ __forceinline__ Share(const HeadContext& of, ShareSpace<kWords>& shared,
                                   uint8_t* stages, int rank, int blocks)
      : context(of), space(shared) {
    const int units = of.zone.units(device::kUnitKeys<kWords>);
    const int first = device::share_begin(units, rank, blocks);
    const int count = device::share_begin(units, rank + 1, blocks) - first;
    const int warp = device::kept_warp();
    begin = device::uniform(first + device::warp_begin(count, warp));
    end = device::uniform(first + device::warp_begin(count, warp + 1));
    ring = {stages + warp * ShareSpace<kWords>::kWarpBytes, shared.barriers[warp]};
    ring.init_barriers();
    ring.prime(of.zone, begin, end);
  }

  /** Another round through the same units. All threads. */
  __device__ __forceinline__ void begin_again() {
    __syncthreads();
    ring.prime(context.zone, begin, end);
  }

  /** What rounds of `step` of all searchers leave. */
  __device__ __forceinline__ device::ScoreOutput output(int from, int step, int searchers) const {
    return {context.scratch.scores, space.histogram[device::kept_warp()], from > 0,
            from + step >= searchers};
  }

  /** All scores are written: counts, and the block's flag. All threads. */
  __device__ __forceinline__ void finish(int rank, uint32_t token) const {
    __syncwarp();
    device::write_counts(space.histogram, context.scratch.counts + rank);
    ReadyFlags{context.scratch.flags}.set(ReadyFlags::kScored + rank, token);
    device::wait_for_predecessor();
  }
};

}  // namespace pariskv::cuda
