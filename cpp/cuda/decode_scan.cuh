/**
 * The first kernel of a decode: queries prepared, every key of the zone scored. A team of blocks
 * shares the zone of a head, each with a share of its own; they never meet.
 */
#pragma once

#include "decode_space.cuh"

namespace pariskv::cuda {

template <int kWords>
struct ScanSpace {
  uint64_t ring[device::kWarps][device::kMaxStages];
  device::Queries<kWords> queries;
  uint32_t histogram[device::kWarps][256];
  HeadContext context;
};

/** Bytes of vote tables in shared memory: of one searcher, or of four in the bytes of words. */
template <int kWords>
constexpr int kTableBytes = 4 * kWords * 256;

template <typename Element, int kWords>
struct Scan {
  const DecodeLaunch& launch;
  ScanSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  int rank;  // in the team

  static constexpr int kSearchers = device::kQueries<kWords>;  // prepared at a time

  __device__ __forceinline__ uint8_t* units() const {
    return reinterpret_cast<uint8_t*>(&space) + (sizeof space + 127) / 128 * 128;
  }
  __device__ __forceinline__ uint8_t* tables() const {
    return units() + device::kWarps * launch.stages * device::kUnitBytes<kWords>;
  }
  __device__ __forceinline__ device::Ring<kWords> make_ring() const {
    const int warp = device::warp_id();
    device::Ring<kWords> ring;
    ring.stages = units() + warp * launch.stages * device::kUnitBytes<kWords>;
    ring.barriers = space.ring[warp];
    ring.count = launch.stages;
    ring.init_barriers();
    return ring;
  }

  /** Searchers from `from` on, and whether one of them leads. Ends with a barrier. */
  __device__ __forceinline__ void prepare(int from, device::Lead& lead) const {
    block.prepare_signs(from, space.queries);
    if (rank == 0) block.leave_queries(from, space.queries);
    device::wait_for_predecessor();
    if (block.searchers() > 1) block.add_windows(from, space.queries);
    lead.consider(space.queries, min(block.searchers() - from, kSearchers));
    __syncthreads();
  }

  __device__ __forceinline__ void run() const {
    const device::Zone zone = block.context.zone;
    const int units = zone.template units<kWords>();
    const int first = scan_begin(units, rank, launch.team);
    const int count = scan_begin(units, rank + 1, launch.team) - first;
    const int begin = first + device::warp_begin(count, device::warp_id());
    const int end = first + device::warp_begin(count, device::warp_id() + 1);
    device::Ring<kWords> ring = make_ring();
    ring.prime(zone, begin, end);

    device::Lead lead;
    if (!block.votes() && block.searchers() > kSearchers) {  // the lead is one of all
#pragma unroll 1
      for (int from = 0; from < block.searchers(); from += kSearchers) prepare(from, lead);
    }
    const int step = !block.votes() ? kSearchers : launch.packed ? 4 : 1;
#pragma unroll 1
    for (int from = 0; from < block.searchers(); from += step) {
      if (from > 0) {
        __syncthreads();
        ring.prime(zone, begin, end);
      }
      const device::ScoreOutput out{block.context.scratch.scores,
                                    space.histogram[device::warp_id()], from > 0,
                                    from + step >= block.searchers()};
      if (!block.votes()) {
        prepare(from, lead);
        device::settle(space.queries, lead);
        const int quads = (min(block.searchers() - from, step) + 3) / 4;
        device::score_signs<kWords>(ring, zone, begin, end, space.queries, quads, out);
      } else if (launch.packed) {
        auto* packed = reinterpret_cast<uint32_t*>(tables());
        device::pack_votes<kWords>(block.context.scratch.votes, from, block.searchers(), packed);
        __syncthreads();
        device::score_votes<kWords>(ring, zone, begin, end, packed, out);
      } else {
        device::copy_votes<kWords>(block.context.scratch.votes, from, tables());
        __syncthreads();
        device::score_votes<kWords>(ring, zone, begin, end, tables(), out);
      }
    }
    __syncthreads();
    for (int bin = int(threadIdx.x); bin < 256; bin += device::kThreads) {
      uint32_t sum = 0;
#pragma unroll
      for (int warp = 0; warp < device::kWarps; ++warp) sum += space.histogram[warp][bin];
      space.histogram[0][bin] = sum;
    }
    __syncthreads();
    if (device::warp_id() == 0) {
      device::write_counts(space.histogram[0], block.context.scratch.counts + rank);
    }
  }
};

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 3)
    scan_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<ScanSpace<kWords>*>(shared);
  const uint32_t team = uint32_t(launch.team);
  device::let_successor_start();
  // Whoever ends has waited: else the kernel might end before the one that it follows.
  if (!find_context<Element>(launch.call, blockIdx.x / team, space.context)) {
    return device::wait_for_predecessor();
  }
  for (int i = int(threadIdx.x); i < device::kWarps * 256; i += device::kThreads) {
    space.histogram[0][i] = 0;
  }
  __syncthreads();
  const Scan<Element, kWords> scan{
      launch, space, {launch.call, space.context}, int(blockIdx.x % team)};
  if (!scan.block.searches()) return device::wait_for_predecessor();
  scan.run();
}

/** Vote tables of all searchers, a warp of the team per subspace; ahead of the scan. */
template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads)
    vote_kernel(const __grid_constant__ DecodeLaunch launch) {
  constexpr int kSubspaces = 4 * kWords;
  __shared__ device::Queries<kWords> queries;
  __shared__ HeadContext context;
  const uint32_t team = uint32_t(launch.team), rank = blockIdx.x % team;
  if (!find_context<Element>(launch.call, blockIdx.x / team, context)) return;
  __syncthreads();
  const HeadBlock<Element, kWords> block{launch.call, context};
  if (!block.searches()) return;
  const int64_t keys = *context.statistics.usable;
#pragma unroll 1
  for (int from = 0; from < block.searchers(); from += device::kQueries<kWords>) {
    if (from > 0) __syncthreads();
    block.prepare_votes(from, queries);
    if (rank == 0) block.leave_queries(from, queries);
    const int tasks = min(block.searchers() - from, device::kQueries<kWords>) * kSubspaces;
#pragma unroll 1
    for (int task = int(rank) * device::kWarps + device::warp_id(); task < tasks;
         task += int(team) * device::kWarps) {
      const int slot = task / kSubspaces, subspace = task % kSubspaces;
      uint8_t* table = context.scratch.votes + (int64_t(from) * kSubspaces + task) * 256;
      if (queries.whole[slot]) {
        device::cast_votes(&queries.rotated[slot][8 * subspace],
                           context.statistics.counts + 256 * subspace, keys, context.vote_ratio,
                           table);
      } else {
        reinterpret_cast<uint2*>(table)[device::lane_id()] = make_uint2(0, 0);
      }
    }
  }
}

}  // namespace pariskv::cuda
