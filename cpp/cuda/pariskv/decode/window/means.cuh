/**
 * Logits of blocks of keys by their means, in whole steps: what a key's score and its estimate
 * begin with. Products of numbers of 8 and 15 bits, so that they are the same bits on every
 * backend.
 */
#pragma once

#include "device/numbers.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/steps.cuh"
#include "pariskv/decode/sums.cuh"
#include "pariskv/decode/window/logits.cuh"
#include "policy/pariskv/codec/head_scale.h"

namespace pariskv::cuda {

/** Most blocks of threads that look at the means of a head. */
constexpr int kMostMeanBlocks = 32;

/** Four queries, quantised as they are, and what each warp finds of its tile. */
template <int kWords>
struct MeanSpace {
  static constexpr int kQueries = 4;
  alignas(16) int16_t elements[kQueries][32 * kWords];
  float base[kQueries];  // steps per unit of a product, for a mean's step of 1
  int centre[kQueries];  // steps of the logit of the centre, which is a part of every block's
  int most[device::kWarps][kQueries];
  device::ChunkSums sums[device::kWarps][kQueries];
};

/**
 * A warp takes a tile of 16 means, four of them a chunk. Means are rows of a matrix product, by
 * bytes, with four queries in columns. A query has 15 bits and two columns, of bits 7 and up and of
 * the rest. So lane 4 g + t ends with both sums of query t for means g and g + 8.
 */
template <typename Element, int kWords>
struct Means {
  const WindowParams& params;
  const HeadBlock<Element, kWords>& block;
  MeanSpace<kWords>& space;
  const KeyBlocks blocks;

  static constexpr int kQueries = MeanSpace<kWords>::kQueries;
  static constexpr int kPieces = kWords / 2;  // of 16 channels, that a lane has of a mean
  static constexpr int kTiles = int(kChunkBlocks) / 16;
  static constexpr int kChunks = device::kWarps / kTiles;  // of a block at a time

  /** The warp's searcher: zeros for one that is not finite, or is none. */
  __device__ __forceinline__ void prepare(int searcher) const {
    const int slot = device::warp_id();
    if (slot >= kQueries) return;
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
    __syncwarp();
    int64_t dot = 0;
    for (int c = device::lane_id(); c < block.context.shape.key_dim; c += 32) {
      dot += int(space.elements[slot][c]) * int(block.context.centre[c]);
    }
#pragma unroll
    for (int lane = 16; lane >= 1; lane /= 2) dot += __shfl_xor_sync(~0u, dot, lane);
    if (device::lane_id() != 0) return;
    const float unit = __fmul_rn(space.base[slot], *block.context.centre_step);
    space.centre[slot] = device::finite(unit) ? device::steps_of(__fmul_rn(float(dot), unit)) : 0;
  }

  /** What a lane holds of the queries: of each piece, two products' worth of column g. */
  struct Columns {
    uint32_t words[kPieces][2][2];
  };

  __device__ __forceinline__ Columns columns() const {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
    const int shift = g % 2 == 0 ? 7 : 0;
    const uint32_t mask = g % 2 == 0 ? 0x00ff00ff : 0x007f007f;
    Columns out;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 eight =
            *reinterpret_cast<const uint4*>(&space.elements[g / 2][16 * (t + 4 * i) + 8 * half]);
        out.words[i][half][0] =
            __byte_perm(eight.x >> shift & mask, eight.y >> shift & mask, 0x6420);
        out.words[i][half][1] =
            __byte_perm(eight.z >> shift & mask, eight.w >> shift & mask, 0x6420);
      }
    }
    return out;
  }

  /** A lane's part of two means of a tile. */
  struct Tile {
    uint4 pieces[2][kPieces];
    float step[2];
  };

  /** Numbers out of the zone read the nearest one that there is. */
  __device__ __forceinline__ int nearest(int number) const {
    return min(max(number, blocks.first), blocks.last);
  }

  __device__ __forceinline__ void read(int first, Tile& tile) const {
    const device::Zone& zone = block.context.zone;
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int number = nearest(first + g + 8 * row);
      const device::Slot at = device::slot_of(zone, number << zone.block_bits);
      const int own = at.slot >> zone.block_bits;
      const auto* levels =
          reinterpret_cast<const uint4*>(at.block + zone.layout.means_at(zone.head, own));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) tile.pieces[row][i] = levels[t + 4 * i];
      tile.step[row] =
          *reinterpret_cast<const float*>(at.block + zone.layout.steps_at(zone.head, own));
    }
  }

  /** Logits of a tile's means, of query t: to `out` of each, and to `steps`. */
  __device__ __forceinline__ void multiply(const Tile& tile, const Columns& queries, float base,
                                           int centre, int first, int from, int (&steps)[2]) const {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
    int sums[4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 a = tile.pieces[0][i], b = tile.pieces[1][i];
      device::ptx::mma_m16n8k32_s8(sums, {a.x, b.x, a.y, b.y}, queries.words[i][0]);
      device::ptx::mma_m16n8k32_s8(sums, {a.z, b.z, a.w, b.w}, queries.words[i][1]);
    }
    int32_t* out = block.context.scratch.block_steps + from + t;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int number = first + g + 8 * row;
      const float unit = __fmul_rn(base, tile.step[row]);
      const int dot = 128 * sums[2 * row] + sums[2 * row + 1];
      const int own = device::finite(unit) ? device::steps_of(__fmul_rn(float(dot), unit)) : 0;
      const int logit = joined_steps(own, centre);
      const bool there = nearest(number) == number;
      steps[row] = there ? logit : device::kNoSteps;
      if (there) {
        out[int64_t(number - block.context.zone.first_block()) * steps_pitch(block.searchers())] =
            logit;
      }
    }
  }

  /** Sums over a tile's logits of query t: in lane t. */
  template <typename T, typename Join>
  static __device__ __forceinline__ T over_means(T x, Join join) {
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2) x = join(x, __shfl_xor_sync(~0u, x, lane));
    return x;
  }

  /** The chunk's sums, of which this warp has a tile's. All threads; two barriers. */
  __device__ __forceinline__ void sum(int chunk, int from, const int (&steps)[2]) const {
    const int warp = device::warp_id(), lane = device::lane_id();
    const int first_warp = warp / kTiles * kTiles;
    int most = over_means(max(steps[0], steps[1]), [](int a, int b) { return max(a, b); });
    if (lane < kQueries) space.most[warp][lane] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) most = max(most, space.most[first_warp + i][lane % kQueries]);
    int sum = 0, weight = 0;
    int64_t squares = 0;
#pragma unroll
    for (const int one : steps) {
      if (one == device::kNoSteps) continue;
      sum += one;  // of kMostSteps at most
      squares += int64_t{one} * one;
      weight += int(BlockSums::lowered(1 << 16, most - one));
    }
    const auto add = [](auto a, auto b) { return a + b; };
    sum = over_means(sum, add), weight = over_means(weight, add);
    squares = over_means(squares, add);
    if (lane < kQueries) space.sums[warp][lane] = {sum, most, weight, 0, squares, 0};
    __syncthreads();
    if (warp != first_warp || lane >= kQueries || from + lane >= block.searchers()) return;
    device::ChunkSums all = space.sums[warp][lane];
#pragma unroll
    for (int i = 1; i < kTiles; ++i) {
      const device::ChunkSums& tile = space.sums[warp + i][lane];
      all.sum += tile.sum, all.weight += tile.weight, all.squares += tile.squares;
    }
    if (chunk > blocks.last_chunk) return;
    block.context.scratch.chunks[(chunk - blocks.first_chunk) * block.searchers() + from + lane] =
        all;
  }

  /** Every `blocks_of_head`-th pair of chunks from this block's on. All threads. */
  __device__ __forceinline__ void run(int rank, int blocks_of_head) const {
    const int first = blocks.first_chunk + rank * kChunks, step = blocks_of_head * kChunks;
    if (first > blocks.last_chunk) return;
    const int own = device::warp_id() / kTiles, tile = device::warp_id() % kTiles;
    const auto means_of = [&](int chunk) { return (chunk + own) * int(kChunkBlocks) + 16 * tile; };
    for (int from = 0; from < block.searchers(); from += kQueries) {
      Tile next;
      read(means_of(first), next);
      if (from > 0) __syncthreads();
      prepare(from + device::warp_id());
      __syncthreads();
      const Columns queries = columns();
      const float base = space.base[device::lane_id() % kQueries];
      const int centre = space.centre[device::lane_id() % kQueries];
      for (int chunk = first; chunk <= blocks.last_chunk; chunk += step) {
        const Tile here = next;
        if (chunk + step <= blocks.last_chunk) read(means_of(chunk + step), next);
        int steps[2];
        multiply(here, queries, base, centre, means_of(chunk), from, steps);
        sum(chunk + own, from, steps);
        if (from + kQueries < block.searchers()) continue;
        __syncwarp();
        if (tile == 0 && device::lane_id() == 0 && chunk + own <= blocks.last_chunk) {
          device::store_release(
              block.context.scratch.chunk_flags + (chunk + own - blocks.first_chunk), params.token);
        }
      }
    }
  }
};

}  // namespace pariskv::cuda
