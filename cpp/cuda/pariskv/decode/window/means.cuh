/**
 * Logits of blocks of keys by their means, in whole steps: what a key's score and its estimate
 * begin with. Products of numbers of 8 and 15 bits, so that they are the same bits on every
 * backend.
 */
#pragma once

#include "codec/head_scale.h"
#include "device/numbers.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/score/chunk_sums.cuh"
#include "pariskv/decode/steps.cuh"
#include "pariskv/decode/window/logits.cuh"

namespace pariskv::cuda {

/** Most blocks of threads that look at the means of a head. */
constexpr int kMostMeanBlocks = 64;

/** Queries of some searchers, quantised as they are, and logits of a chunk for them. */
template <int kWords>
struct MeanSpace {
  static constexpr int kQueries = device::kWarps;
  alignas(16) int16_t elements[kQueries][32 * kWords];
  float base[kQueries];  // steps per unit of a product, for a mean's step of 1
  int32_t steps[kQueries][kChunkBlocks];
};

template <typename Element, int kWords>
struct Means {
  const WindowParams& params;
  const HeadBlock<Element, kWords>& block;
  MeanSpace<kWords>& space;
  const KeyBlocks blocks;

  static constexpr int kLanes = 4;  // of a mean
  static_assert(device::kThreads == kLanes * kChunkBlocks);

  /** The warp's searcher: zeros for one that is not finite, or is none. */
  __device__ __forceinline__ void prepare(int searcher) const {
    const int slot = device::warp_id();
    float x[kWords] = {};
    if (searcher < block.searchers()) {
      device::load_query<Element, kWords>(block.rows_of_searchers()(searcher), x);
      block.stretch(x);
      float rotated[kWords];
#pragma unroll
      for (int r = 0; r < kWords; ++r) rotated[r] = x[r];
      if (!device::rotate<kWords>(params.call.codec.negative, rotated)) {
#pragma unroll
        for (int r = 0; r < kWords; ++r) x[r] = 0;
      }
    }
    device::quantise_plain(x, kFineLevels, block.call.logits.scale, space.elements[slot],
                           space.base[slot]);
  }

  static constexpr int kPieces = kWords / 2;  // of 16 channels, of a lane

  /** A lane's part of a mean, read ahead. */
  struct Part {
    uint4 pieces[kPieces];
    float step;
    int number;  // the nearest one that there is
    bool there;
  };

  __device__ __forceinline__ Part read(int chunk) const {
    const device::Zone& zone = block.context.zone;
    const int number = chunk * int(kChunkBlocks) + int(threadIdx.x) / kLanes;
    Part part;
    part.there = blocks.first <= number && number <= blocks.last;
    part.number = min(max(number, blocks.first), blocks.last);
    const device::Slot at = device::slot_of(zone, part.number << zone.block_bits);
    const int own = at.slot >> zone.block_bits;
    const auto* levels =
        reinterpret_cast<const uint4*>(at.block + zone.layout.means_at(zone.head, own));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      part.pieces[i] = levels[int(threadIdx.x) % kLanes + kLanes * i];
    }
    part.step = *reinterpret_cast<const float*>(at.block + zone.layout.steps_at(zone.head, own));
    return part;
  }

  /** Logits of one mean, four lanes to it, for `count` searchers from `from` on. */
  __device__ __forceinline__ void multiply(const Part& part, int from, int count) const {
    const int in_chunk = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
    int32_t* out =
        block.context.scratch.block_steps +
        int64_t(part.number - block.context.zone.first_block()) * steps_pitch(block.searchers()) +
        from;
#pragma unroll 1
    for (int slot = 0; slot < count; ++slot) {
      int dot = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const auto* query =
            reinterpret_cast<const int2*>(&space.elements[slot][16 * (lane + kLanes * i)]);
        const uint4 levels = part.pieces[i];
        const uint32_t words[4] = {levels.x, levels.y, levels.z, levels.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int2 four = query[w];
          dot = __dp2a_lo(four.x, int(words[w]), dot);
          dot = __dp2a_hi(four.y, int(words[w]), dot);
        }
      }
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      const float unit = __fmul_rn(space.base[slot], part.step);
      const int logit = device::finite(unit) ? device::steps_of(__fmul_rn(float(dot), unit)) : 0;
      if (lane > 0) continue;
      space.steps[slot][in_chunk] = part.there ? logit : device::kNoSteps;
      if (part.there) out[slot] = logit;
    }
  }

  /** Sums over a chunk's logits, by the warp of a searcher. */
  __device__ __forceinline__ void sum(int chunk, int searcher) const {
    const int slot = device::warp_id();
    const int mine[2] = {space.steps[slot][device::lane_id()],
                         space.steps[slot][device::lane_id() + 32]};
    const int most = __reduce_max_sync(~0u, max(mine[0], mine[1]));
    int sum = 0, weight = 0;
    int64_t squares = 0;
#pragma unroll
    for (const int steps : mine) {
      if (steps == device::kNoSteps) continue;
      sum += steps;  // of 2^20 at most
      squares += int64_t{steps} * steps;
      weight += int(BlockSums::lowered(1 << 16, most - steps));
    }
    sum = __reduce_add_sync(~0u, sum);
    weight = __reduce_add_sync(~0u, weight);
    squares = device::warp_sum(squares);
    if (device::lane_id() > 0) return;
    block.context.scratch.chunks[(chunk - blocks.first_chunk) * block.searchers() + searcher] = {
        sum, most, weight, 0, squares, 0};
  }

  /** Every `step`-th chunk from this block's on. All threads. */
  __device__ __forceinline__ void run(int rank, int step) const {
    static_assert(kChunkBlocks == 64, "a lane has two");
    constexpr int kQueries = MeanSpace<kWords>::kQueries;
    if (blocks.first_chunk + rank > blocks.last_chunk) return;
    for (int from = 0; from < block.searchers(); from += kQueries) {
      const int count = min(block.searchers() - from, kQueries);
      Part next = read(blocks.first_chunk + rank);
      prepare(from + device::warp_id());
      __syncthreads();
      for (int chunk = blocks.first_chunk + rank; chunk <= blocks.last_chunk; chunk += step) {
        const Part part = next;
        if (chunk + step <= blocks.last_chunk) next = read(chunk + step);
        multiply(part, from, count);
        __syncthreads();
        if (device::warp_id() < count) sum(chunk, from + device::warp_id());
        __syncthreads();
        if (from + count < block.searchers()) continue;
        device::store_release_after_block(
            block.context.scratch.chunk_flags + (chunk - blocks.first_chunk), params.token);
      }
    }
  }
};

}  // namespace pariskv::cuda
