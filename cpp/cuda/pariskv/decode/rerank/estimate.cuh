/**
 * Logits of candidates from their 4-bit codes, and sums of their exponentials by slices.
 */
#pragma once

#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/rerank/codes.cuh"
#include "pariskv/decode/scratch.h"
#include "pariskv/decode/sums.cuh"
#include "policy/pariskv/codec/head_scale.h"

namespace pariskv::cuda::device {

/** Keys that a warp estimates at a time. */
constexpr int kTileKeys = 16;

/**
 * How the keys of a head lie in tiles, slice after slice: one begins with a tile of its own, and
 * every eighth tile is the same warp's, whichever block has it. So sums are the same however many
 * blocks share a head.
 */
struct Tiles {
  int of_slice;
  float inverse;  // of that: there are less than 2^16, in 32 slices

  __device__ __forceinline__ Tiles(int candidates, int samples_of_slice)
      : of_slice((slice_begin(candidates + kSlices - 1, 1) + samples_of_slice + kTileKeys - 1) /
                 kTileKeys) {
    inverse = __frcp_rn(float(of_slice));
  }
  /** Of a tile, both counted from some slice's first one. */
  __device__ __forceinline__ int slice_of(int tile) const {
    return int((float(tile) + 0.5f) * inverse);
  }
};

/** Sums of exponentials of slices, by warps: of up to four heads. */
using SliceMasses = Mass[kSlices][4][kWarps];

/** Where the estimates of a head go, and the factors that make them. */
struct EstimateOutput {
  float* logits;  // (4, ...) of candidates, `stride` apart
  int stride;     // four of them are less than 2^31
  int heads;      // of four
  float softcap;
  float log_weight;            // samples count e^log_weight times, and only in the sums
  BlockSteps blocks;           // logits of means, from the first of these heads on
  bool looks_beyond;           // leaves scales of candidates and logits of samples
  int from;                    // the first of the heads
  const HeadScratch& scratch;  // in shared memory: its addresses take no registers
};

/** Two sums of exponentials of a lane: of queries 2 (t % 2) and 2 (t % 2) + 1. */
struct TwoMasses {
  Mass of[2];

  __device__ __forceinline__ void clear() { of[0] = of[1] = {-infinity(), 0}; }
  /** Those of all keys of a warp, in the order of exchanges: the same in lanes of equal t % 2. */
  __device__ __forceinline__ void add_lanes() {
    float top[2] = {of[0].maximum, of[1].maximum};
#pragma unroll
    for (int step = 2; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = top[i] == -infinity() ? 0.0f : top[i];
      of[i] = {top[i], of[i].sum * exp_of(of[i].maximum - shift)};
    }
#pragma unroll
    for (int step = 2; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) of[i].sum += __shfl_xor_sync(~0u, of[i].sum, step);
    }
  }
};

/** The slice that a warp is at, counted from the block's first one, and its sums. */
struct MassesOfWarp {
  TwoMasses sums;
  int slice, end_tile;

  __device__ __forceinline__ explicit MassesOfWarp(const Tiles& tiles)
      : slice(0), end_tile(tiles.of_slice) {
    sums.clear();
  }
  /** To the slice of a tile: sums of those before are left. All lanes. */
  __device__ __forceinline__ void advance(int tile, const Tiles& tiles, SliceMasses& out) {
#pragma unroll 1
    for (; tile >= end_tile; end_tile += tiles.of_slice) {
      sums.add_lanes();
      if (lane_id() < 2) {
        out[slice][2 * lane_id()][warp_id()] = sums.of[0];
        out[slice][2 * lane_id() + 1][warp_id()] = sums.of[1];
      }
      sums.clear();
      ++slice;
    }
  }
};

/**
 * Estimated logits of gathered codes for four queries, and sums of their exponentials. All threads:
 * a warp has every eighth tile.
 * @param codes   of CodeLayout
 * @param places  of the same keys
 * @param tile    the first of theirs, counted from the block's first one
 * @param count   of tiles
 * @param turn    how many tiles of the head are before these: decides which warp has which
 * @param blocks  (keys) their blocks' numbers, from the zone's origin on; unset without blocks
 */
template <int kWords>
__device__ __forceinline__ void estimate(const EstimateQueries<kWords>& queries,
                                         const LevelTable& table, const char* codes,
                                         const KeyPlace* places, const int* blocks, int tile,
                                         int count, int turn, const Tiles& tiles,
                                         const EstimateOutput& out, MassesOfWarp& masses,
                                         SliceMasses& slices) {
  using Layout = CodeLayout<kWords>;
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll 1
  for (int at = (warp_id() - turn) & (kWarps - 1); at < count; at += kWarps) {
    masses.advance(tile + at, tiles, slices);
    const int first = kTileKeys * at + g, second = first + 8;
    const char* first_code = codes + first * Layout::kPitch;
    const char* second_code = codes + second * Layout::kPitch;
    const bool upper = t >= 2;  // the lane is left with the second key, and two queries
    const int key = upper ? second : first;
    int steps[2] = {};
    if (out.blocks.bits > 0 && places[key].block != nullptr) {
      const int2 both = __ldcg(reinterpret_cast<const int2*>(
          out.blocks.steps + int64_t(blocks[key]) * out.blocks.pitch + 2 * (t % 2)));
      steps[0] = both.x, steps[1] = both.y;
    }
    float sums[4] = {}, rests[4] = {};  // two chains: products follow one another slowly
#pragma unroll
    for (int u = 0; u < kLaneWords<kWords>; ++u) {
      CodeBits keys[2];
      load_codes<kWords>(first_code, places[first].slot, t + 4 * u, keys[0]);
      load_codes<kWords>(second_code, places[second].slot, t + 4 * u, keys[1]);
      multiply_codes(keys, table, queries.pairs[u], sums, rests);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += rests[i];
    // Both terms of a query together.
    const float rest0 = __shfl_xor_sync(~0u, upper ? sums[0] : sums[2], 2);
    const float rest1 = __shfl_xor_sync(~0u, upper ? sums[1] : sums[3], 2);
    const float both[2] = {(upper ? sums[2] : sums[0]) + rest0,
                           (upper ? sums[3] : sums[1]) + rest1};
    if (places[key].block == nullptr) continue;
    const int candidate = places[key].candidate;
    const char* code = upper ? second_code : first_code;
    const float scale = float_of(
        scale_bits(*reinterpret_cast<const uint16_t*>(code + Layout::scale(places[key].slot))));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * (t % 2) + i;
      if (head >= out.heads) continue;
      const float left = __fmul_rn(__fmul_rn(both[i], queries.size[i]), scale);
      const float logit =
          soft_capped(__fadd_rn(left, __fmul_rn(float(steps[i]), kLogitOfStep)), out.softcap);
      if (candidate >= 0) out.logits[head * out.stride + candidate] = logit;
      if (out.looks_beyond && candidate < 0) {
        out.scratch.errors[out.from + head].samples[-1 - candidate] = logit;
      } else if (out.looks_beyond && out.from + head == 0) {
        out.scratch.scales[candidate] = scale;
      }
      masses.sums.of[i].add(candidate >= 0 ? logit : logit + out.log_weight);
    }
  }
}

/** Several masses, added in order. */
template <int kCount>
__device__ __forceinline__ Mass sum_of(const Mass (&masses)[kCount]) {
  float top = -infinity();
#pragma unroll
  for (int i = 0; i < kCount; ++i) top = fmaxf(top, masses[i].maximum);
  const float shift = top == -infinity() ? 0.0f : top;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum = __fmaf_rn(masses[i].sum, exp_of(masses[i].maximum - shift), sum);
  }
  return {top, sum};
}

}  // namespace pariskv::cuda::device
