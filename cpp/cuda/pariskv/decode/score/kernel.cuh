/**
 * score: queries prepared, every key of the zone scored by the signs of its dimensions. Blocks
 * share the zone of a head, each with a share of its own; they never meet.
 */
#pragma once

#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/score/keys.cuh"
#include "pariskv/decode/score/queries.cuh"
#include "pariskv/decode/score/signs.cuh"
#include "pariskv/decode/sums.cuh"

namespace pariskv::cuda {

template <int kWords, bool kBlocks>
struct ScoreSpace {
  device::Queries<kWords> queries;
  device::KnownStatistics<kWords, kBlocks> statistics;
  ShareSpace<kWords> share;
  HeadContext context;
};

/** Half of the shared memory of a multiprocessor beside a block that reranks. */
constexpr int kMostScoreBytes = 55 << 10;

/**
 * Asks for the queries of the first round, by warps that do not look for the head's context
 * meanwhile; to be followed by a commit, a wait and a barrier.
 */
template <typename Element, int kWords>
__device__ __forceinline__ void stage_queries(const ScoreParams& params, uint32_t index,
                                              device::Queries<kWords>& out) {
  constexpr int kFirstIdle = 5, kLanes = 16;  // of each query
  constexpr int kAtOnce = (device::kWarps - kFirstIdle) * 32 / kLanes;
  const DecodeCall& call = params.call;
  const int thread = int(threadIdx.x) - 32 * kFirstIdle;
  if (thread < 0 || !params.stages_queries) return;
  const int row = row_of_head(params, index);
  if (row < 0) return;
  const auto rows_of = HeadBlock<Element, kWords>::rows_of_head(call, row, int(index));
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

/** @tparam kBlocks  keys are told from the means of their blocks */
template <typename Element, int kWords, bool kBlocks>
struct Score {
  const ScoreParams& params;
  ScoreSpace<kWords, kBlocks>& space;
  HeadBlock<Element, kWords> block;
  int rank;  // of the head's blocks

  static constexpr int kSearchers = device::kQueries<kWords>;  // prepared at a time
  static constexpr int kSpaceBytes = int((sizeof(ScoreSpace<kWords, kBlocks>) + 127) / 128 * 128);
  static constexpr int kBytes = kSpaceBytes + ShareSpace<kWords>::kStageBytes;
  static_assert(kBytes <= kMostScoreBytes || kWords == 16, "of 512 dimensions a block is alone");

  /**
   * prepare_query for searchers from `from` on: the inputs of `settle`. All threads; ends with a
   * barrier.
   * @param first  results of other blocks may not be there yet
   * @param there  queries lie, as they are, where the rotated ones will
   */
  __device__ __forceinline__ void prepare_queries(int from, bool first, bool there) const {
    const device::KnownStatistics<kWords, kBlocks>& known = space.statistics;
    device::Queries<kWords>& out = space.queries;
    const KeyNumbers keys = KeyNumbers::of(known.usable, known.square_units);
    const int count = min(block.searchers() - from, kSearchers);
    const bool look = block.searchers() > 1;
    const HeadScratch& scratch = block.context.scratch;
    device::prepare_queries<kWords>(
        block.call.codec.negative, from, block.searchers(),
        [&](int slot, float (&x)[kWords]) {
          if (there) {
#pragma unroll
            for (int r = 0; r < kWords; ++r) {
              const int d = 32 * r + device::lane_id();
              const auto* query = reinterpret_cast<const Element*>(out.rotated[slot]);
              if (d < block.context.shape.key_dim) {
                x[r] = __fadd_rn(x[r], device::to_float(query[d]));
              }
            }
            __syncwarp();  // it will be overwritten
          } else {
            device::load_query<Element, kWords>(block.rows_of_searchers()(from + slot), x);
          }
          if constexpr (kBlocks) block.stretch(x);
        },
        [&](int slot, const float (&x)[kWords]) {
          float step = 0;
          const QuerySums sums = device::quantise<kWords>(x, known, keys, out, slot, step);
          const float slope = slope_of(block.call.logits.scale, step, 32 * kWords);
          if constexpr (kBlocks) {
            const KeyBlocks blocks(block.context.zone);
            if (first) device::await_chunks(scratch.chunk_flags, blocks.chunks(), params.token);
            const BlockSums of_blocks =
                device::sum_chunks(scratch.chunks + from + slot, blocks.chunks(), block.searchers(),
                                   blocks.last + 1 - blocks.first);
            if (device::lane_id() != 0) return;
            out.set_scale(slot, scale_of_blocks(keys, of_blocks, sums.square, slope));
          } else {
            if (device::lane_id() != 0) return;
            out.set_scale(slot, scale_of_zone(keys, sums, slope));
          }
        },
        out);
    // From the last warp down: with few searchers it has nothing else to do.
    const int seeing = device::kWarps - 1 - device::warp_id();
    if (look && seeing < count) {
      const uint64_t* rows = scratch.windows + (from + seeing) * int(kWindowRows);
      const float seen = device::sum_window(rows, params.token, block.biases(from + seeing));
      if (device::lane_id() == 0) out.windows[seeing] = seen;
    }
    __syncthreads();
    if (!kBlocks && !look) return;
    const int slot = int(threadIdx.x);
    if (slot < count) {
      out.scales[slot].add_window(look ? out.windows[slot] : -device::infinity());
    }
    __syncthreads();
  }

  /**
   * Searchers from `from` on, and whether one of them leads. Ends with a barrier.
   * @param first  the first round
   */
  __device__ __forceinline__ void prepare(int from, Lead& lead, bool& first) const {
    if (first) {
      device::ptx::cp_async_wait_group<0>();  // statistics, queries
      __syncthreads();
    }
    prepare_queries(from, first, first && params.stages_queries);
    first = false;
    const int count = min(block.searchers() - from, kSearchers);
#pragma unroll 1
    for (int slot = 0; slot < count; ++slot) lead.consider(space.queries.scales[slot]);
    __syncthreads();
  }

  __device__ __forceinline__ void run() const {
    Share<kWords> share(block.context, space.share,
                        reinterpret_cast<uint8_t*>(&space) + kSpaceBytes, rank,
                        params.blocks_per_head);
    const int searchers = block.searchers();
    Lead lead;
    bool first = true;
    if (searchers > kSearchers) {  // the lead is one of all
#pragma unroll 1
      for (int from = 0; from < searchers; from += kSearchers) prepare(from, lead, first);
    }
#pragma unroll 1
    for (int from = 0; from < searchers; from += kSearchers) {
      if (from > 0) share.begin_again();
      prepare(from, lead, first);
      device::settle(space.queries, lead, searchers);
      const int quads = (min(searchers - from, kSearchers) + 3) / 4;
      device::score_signs<kWords, kBlocks>(
          share.ring, block.context.zone, share.begin, share.end, space.queries, quads,
          BlockSteps(block.context.zone, block.context.scratch.block_steps + from, searchers),
          share.output(from, kSearchers, searchers));
    }
    share.finish(rank, params.token);
  }
};

template <typename Element, int kWords, bool kBlocks>
__global__ void __launch_bounds__(device::kThreads, 3)
    score_kernel(const __grid_constant__ ScoreParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<ScoreSpace<kWords, kBlocks>*>(shared);
  const uint32_t index = params.by_blocks(int(blockIdx.x));
  const uint32_t rank = blockIdx.x - index * uint32_t(params.blocks_per_head);
  device::let_successor_start();
  stage_queries<Element>(params, index, space.queries);
  const auto look = [&](const ParisKVSlot& slot, int head) {
    const void* state = slot.layers[params.call.layer][Part::kState];
    if (state == nullptr) return;
    space.statistics.stage(device::statistics_of(params.call.codec.layout, state, head));
  };
  // Wait before every return: this grid must not end before its predecessor.
  if (!find_context<Element>(params, index, space.context, [](const SequenceView&, int) {}, look)) {
    return device::wait_for_predecessor();
  }
  device::ptx::cp_async_commit_group();  // before keys come, which are not waited for with these
  space.share.clear();
  __syncthreads();
  const Score<Element, kWords, kBlocks> score{
      params, space, {params.call, space.context}, int(rank)};
  if (!score.block.searches()) return device::wait_for_predecessor();
  score.run();
}

}  // namespace pariskv::cuda
