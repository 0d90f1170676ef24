/**
 * Scores by votes, as published: one kernel fills the vote tables of all searchers, the next one
 * scores every key of the zone by them. Nothing of it is seen by the kernels that score by signs.
 */
#pragma once

#include "pariskv/decode/score/keys.cuh"
#include "pariskv/decode/score/queries.cuh"
#include "pariskv/decode/votes/cast.cuh"
#include "pariskv/decode/votes/tables.cuh"

namespace pariskv::cuda {

/** Bytes of a vote table in shared memory: room for one searcher, and a quarter of four. */
template <int kWords>
constexpr int kTableBytes = 256 * device::kBanks;
static_assert(kTableBytes<8> >= 4 * 8 * 256);

/** Vote tables of all searchers, a warp of the head's blocks per subspace. */
template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads)
    prepare_votes_kernel(const __grid_constant__ VotesParams params) {
  constexpr int kSubspaces = 4 * kWords;
  __shared__ device::Queries<kWords> queries;
  __shared__ device::HeadStatistics statistics;
  __shared__ double vote_ratio;
  __shared__ HeadContext context;
  device::let_successor_start();
  const uint32_t blocks = uint32_t(params.blocks_per_head);
  const uint32_t index = params.by_blocks(int(blockIdx.x)), rank = blockIdx.x - index * blocks;
  const auto also = [&](const SequenceView& view, int head) {
    statistics = device::statistics_of(params.call.codec.layout, view[Part::kState], head);
    vote_ratio = ParisKVPlan::of(view).vote_ratio;
  };
  if (!find_context<Element>(params, index, context, also)) return;
  __syncthreads();
  const HeadBlock<Element, kWords> block{params.call, context};
  if (!block.searches()) return;
  const int64_t keys = *statistics.usable;
#pragma unroll 1
  for (int from = 0; from < block.searchers(); from += device::kQueries<kWords>) {
    if (from > 0) __syncthreads();
    const auto load = [&](int slot, float (&x)[kWords]) {
      device::load_query<Element, kWords>(block.rows_of_searchers()(from + slot), x);
    };
    device::prepare_queries<kWords>(
        params.call.codec.negative, from, block.searchers(), load, [](int, const auto&) {},
        queries);
    __syncthreads();
    const int tasks = min(block.searchers() - from, device::kQueries<kWords>) * kSubspaces;
#pragma unroll 1
    for (int task = int(rank) * device::kWarps + device::warp_id(); task < tasks;
         task += int(blocks) * device::kWarps) {
      const int slot = task / kSubspaces, subspace = task % kSubspaces;
      uint8_t* table = context.scratch.votes + (int64_t(from) * kSubspaces + task) * 256;
      if (queries.scales[slot].whole) {
        device::cast_votes(&queries.rotated[slot][8 * subspace], statistics.counts + 256 * subspace,
                           keys, vote_ratio, table);
      } else {
        reinterpret_cast<uint2*>(table)[device::lane_id()] = make_uint2(0, 0);
      }
    }
  }
}

template <int kWords>
struct VotesSpace {
  ShareSpace<kWords> share;
  HeadContext context;

  /** Stages of the ring come after it, and then tables. */
  static constexpr int kBytes =
      int((sizeof(ShareSpace<kWords>) + sizeof(HeadContext) + 255) / 128 * 128);
};
template <int kWords>
constexpr int kVotesBytes = VotesSpace<kWords>::kBytes + ShareSpace<kWords>::kStageBytes;

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 3)
    score_votes_kernel(const __grid_constant__ VotesParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<VotesSpace<kWords>*>(shared);
  static_assert(sizeof(VotesSpace<kWords>) <= VotesSpace<kWords>::kBytes);
  const uint32_t index = params.by_blocks(int(blockIdx.x));
  const int rank = int(blockIdx.x - index * uint32_t(params.blocks_per_head));
  device::let_successor_start();
  if (!find_context<Element>(params, index, space.context)) return device::wait_for_predecessor();
  space.share.clear();
  __syncthreads();
  const HeadBlock<Element, kWords> block{params.call, space.context};
  if (!block.searches()) return device::wait_for_predecessor();
  Share<kWords> share(space.context, space.share, shared + VotesSpace<kWords>::kBytes, rank,
                      params.blocks_per_head);
  uint8_t* tables = shared + kVotesBytes<kWords>;
  const uint8_t* votes = space.context.scratch.votes;
  const int step = params.packed ? 4 : 1, searchers = block.searchers();
  device::wait_for_predecessor();  // the tables
#pragma unroll 1
  for (int from = 0; from < searchers; from += step) {
    if (from > 0) share.begin_again();
    const device::ScoreOutput out = share.output(from, step, searchers);
    if (params.packed) {
      auto* table = reinterpret_cast<uint32_t*>(tables);
      device::pack_votes<kWords>(votes, from, searchers, table);
      __syncthreads();
      device::score_packed<kWords>(share.ring, space.context.zone, share.begin, share.end, table,
                                   out);
    } else {
      device::copy_votes<kWords>(votes, from, tables);
      __syncthreads();
      device::score_votes<kWords>(share.ring, space.context.zone, share.begin, share.end, tables,
                                  out);
    }
  }
  share.finish(rank, params.token);
}

}  // namespace pariskv::cuda
