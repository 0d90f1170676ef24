/**
 * The first kernel of a decode: queries prepared, every key of the zone scored. A team of blocks
 * shares the zone of a head, each with a share of its own; they never meet.
 */
#pragma once

#include "decode_space.cuh"
#include "device/score.cuh"
#include "device/votes.cuh"

namespace pariskv::cuda {

template <int kWords>
struct ScanSpace {
  uint64_t barriers[device::kWarps][device::kStages<kWords>];
  device::Queries<kWords> queries;
  device::KnownStatistics<kWords> statistics;
  alignas(16) uint32_t histogram[device::kWarps][256];
  HeadContext context;
};

/** Of a block with no table: half of what a block that estimates leaves of a processor. */
constexpr int kMostScanBytes = 55 << 10;

/** Bytes of a vote table in shared memory: room for one searcher, and a quarter of four. */
template <int kWords>
constexpr int kTableBytes = 256 * device::kBanks;
static_assert(kTableBytes<8> >= 4 * 8 * 256);

/**
 * Asks for the queries of the first round, by warps that do not look for the head's context
 * meanwhile; to be followed by a commit, a wait and a barrier.
 */
template <typename Element, int kWords>
__device__ __forceinline__ void stage_queries(const DecodeLaunch& launch, uint32_t index,
                                              device::Queries<kWords>& out) {
  constexpr int kFirstIdle = 5, kLanes = 16;  // of each query
  constexpr int kAtOnce = (device::kWarps - kFirstIdle) * 32 / kLanes;
  const DecodeCall& call = launch.call;
  const int thread = int(threadIdx.x) - 32 * kFirstIdle;
  if (thread < 0 || !launch.stages_queries) return;
  index += uint32_t(call.first_head);
  const uint32_t row = launch.by_heads(int(index));
  const int head = int(index - row * uint32_t(call.shape.kv_heads));
  const auto rows_of = HeadBlock<Element, kWords>::rows_of_head(call, int(row), head);
  const int pieces = int(call.shape.rows.key_dim) / device::kElementsPer16<Element>;
  const int count = min(int(call.searchers), device::kQueries<kWords>);
#pragma unroll 1
  for (int slot = thread / kLanes; slot < count; slot += kAtOnce) {
    const auto* from = reinterpret_cast<const uint4*>(rows_of(slot).first);
    const uint32_t to = device::shared_address(out.rotated[slot]);
#pragma unroll 1
    for (int piece = thread % kLanes; piece < pieces; piece += kLanes) {
      device::ptx::cp_async_cg_16(to + 16 * piece, from + piece);
    }
  }
}

template <typename Element, int kWords>
struct Scan {
  const DecodeLaunch& launch;
  ScanSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  int rank;  // in the team

  static constexpr int kSearchers = device::kQueries<kWords>;  // prepared at a time
  static constexpr int kWarpBytes = device::kStages<kWords> * device::kUnitBytes<kWords>;
  static constexpr int kSpaceBytes = int((sizeof(ScanSpace<kWords>) + 127) / 128 * 128);
  static constexpr int kBytes = kSpaceBytes + device::kWarps * kWarpBytes;
  static constexpr bool kVotes = 32 * kWords <= kMaxVoteDim;  // whether it may score by votes
  static_assert(kBytes <= kMostScanBytes || kWords == 16, "of 512 dimensions a block is alone");

  __device__ __forceinline__ uint8_t* stages() const {
    return reinterpret_cast<uint8_t*>(&space) + kSpaceBytes;
  }
  __device__ __forceinline__ uint8_t* tables() const {
    return reinterpret_cast<uint8_t*>(&space) + kBytes;
  }
  __device__ __forceinline__ device::Ring<kWords> make_ring() const {
    const int warp = device::kept_warp();
    device::Ring<kWords> ring{stages() + warp * kWarpBytes, space.barriers[warp]};
    ring.init_barriers();
    return ring;
  }

  /**
   * Searchers from `from` on, and whether one of them leads. Ends with a barrier.
   * @param first  the first round
   */
  __device__ __forceinline__ void prepare(int from, device::Lead& lead, bool& first) const {
    if (first) {
      device::ptx::cp_async_wait_group<0>();  // statistics, queries
      __syncthreads();
    }
    block.prepare_signs(from, first && launch.stages_queries, space.statistics, launch.token,
                        space.queries);
    first = false;
    lead.consider(space.queries, min(block.searchers() - from, kSearchers));
    __syncthreads();
  }

  /** What rounds of `step` searchers leave. */
  __device__ __forceinline__ device::ScoreOutput output(int from, int step) const {
    return {block.context.scratch.scores, space.histogram[device::kept_warp()], from > 0,
            from + step >= block.searchers()};
  }

  __device__ __forceinline__ void run_signs(device::Ring<kWords>& ring, int begin, int end) const {
    const device::Zone& zone = block.context.zone;
    device::Lead lead;
    bool first = true;
    if (block.searchers() > kSearchers) {  // the lead is one of all
#pragma unroll 1
      for (int from = 0; from < block.searchers(); from += kSearchers) prepare(from, lead, first);
    }
#pragma unroll 1
    for (int from = 0; from < block.searchers(); from += kSearchers) {
      if (from > 0) {
        __syncthreads();
        ring.prime(zone, begin, end);
      }
      prepare(from, lead, first);
      device::settle(space.queries, lead);
      const int quads = (min(block.searchers() - from, kSearchers) + 3) / 4;
      device::score_signs<kWords>(ring, zone, begin, end, space.queries, quads,
                                  output(from, kSearchers));
    }
  }

  __device__ __forceinline__ void run_votes(device::Ring<kWords>& ring, int begin, int end) const {
    const device::Zone& zone = block.context.zone;
    const uint8_t* votes = block.context.scratch.votes;
    const int step = launch.packed ? 4 : 1;
    device::wait_for_predecessor();
#pragma unroll 1
    for (int from = 0; from < block.searchers(); from += step) {
      if (from > 0) {
        __syncthreads();
        ring.prime(zone, begin, end);
      }
      if (launch.packed) {
        auto* table = reinterpret_cast<uint32_t*>(tables());
        device::pack_votes<kWords>(votes, from, block.searchers(), table);
        __syncthreads();
        device::score_packed<kWords>(ring, zone, begin, end, table, output(from, step));
      } else {
        device::copy_votes<kWords>(votes, from, tables());
        __syncthreads();
        device::score_votes<kWords>(ring, zone, begin, end, tables(), output(from, step));
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const device::Zone& zone = block.context.zone;
    const int units = zone.template units<kWords>();
    const int first = share_begin(units, rank, launch.scan_blocks);
    const int count = share_begin(units, rank + 1, launch.scan_blocks) - first;
    const int warp = device::kept_warp();
    const int begin = device::uniform(first + device::warp_begin(count, warp));
    const int end = device::uniform(first + device::warp_begin(count, warp + 1));
    device::Ring<kWords> ring = make_ring();
    ring.prime(zone, begin, end);
    bool by_signs = true;
    if constexpr (kVotes) {
      by_signs = !block.votes();
      if (!by_signs) run_votes(ring, begin, end);
    }
    if (by_signs) run_signs(ring, begin, end);
    __syncwarp();
    const HeadScratch& scratch = block.context.scratch;
    device::write_counts(space.histogram, scratch.counts + rank);
    scratch.flags.set_scanned(rank, launch.token);
    device::wait_for_predecessor();
  }
};

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 3)
    scan_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<ScanSpace<kWords>*>(shared);
  const uint32_t index = launch.by_blocks(int(blockIdx.x));
  const uint32_t rank = blockIdx.x - index * uint32_t(launch.scan_blocks);
  device::let_successor_start();
  stage_queries<Element>(launch, index, space.queries);
  const auto look = [&](const Lane& lane, int head) {
    const void* state = lane.layers[launch.call.layer].state;
    if (launch.call.scorer == Scorer::kVotes || state == nullptr) return;
    space.statistics.stage(statistics_of(launch.call.shape, state, head));
  };
  // Whoever ends has waited: else the kernel might end before the one that it follows.
  if (!find_context<Element>(launch, index, space.context, [](const SequenceView&, int) {}, look)) {
    return device::wait_for_predecessor();
  }
  device::ptx::cp_async_commit_group();  // before keys come, which are not waited for with these
  static_assert(device::kThreads == 256);
#pragma unroll
  for (auto& histogram : space.histogram) histogram[threadIdx.x] = 0;
  __syncthreads();
  const Scan<Element, kWords> scan{launch, space, {launch.call, space.context}, int(rank)};
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
  device::let_successor_start();
  const uint32_t blocks = uint32_t(launch.scan_blocks);
  const uint32_t index = launch.by_blocks(int(blockIdx.x)), rank = blockIdx.x - index * blocks;
  if (!find_context<Element>(launch, index, context)) return;
  __syncthreads();
  const HeadBlock<Element, kWords> block{launch.call, context};
  if (!block.searches()) return;
  const int64_t keys = *context.statistics.usable;
#pragma unroll 1
  for (int from = 0; from < block.searchers(); from += device::kQueries<kWords>) {
    if (from > 0) __syncthreads();
    block.prepare_votes(from, queries);
    const int tasks = min(block.searchers() - from, device::kQueries<kWords>) * kSubspaces;
#pragma unroll 1
    for (int task = int(rank) * device::kWarps + device::warp_id(); task < tasks;
         task += int(blocks) * device::kWarps) {
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
