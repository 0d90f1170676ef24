/**
 * Logits of candidates from their 4-bit codes, and sums of their exponentials by slices.
 * Definitions are in estimate_impl.cuh.
 */
#pragma once

#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/mass.cuh"
#include "pariskv/decode/rerank/codes.cuh"
#include "pariskv/decode/rerank/gather.cuh"

namespace pariskv::cuda::device {

/** Two sums of exponentials of a lane: of queries 2 (t % 2) and 2 (t % 2) + 1. */
struct TwoMasses {
  Mass of[2];

  __device__ __forceinline__ void clear() { of[0] = of[1] = {-infinity(), 0}; }
  /** Those of all keys of a warp, in the order of exchanges: the same in lanes of equal t % 2. */
  __device__ __forceinline__ void add_lanes();
};

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

/** The slice that a warp is at, counted from the block's first one, and its sums. */
struct MassesOfWarp {
  TwoMasses sums;
  int slice, end_tile;

  __device__ __forceinline__ explicit MassesOfWarp(const Tiles& tiles)
      : slice(0), end_tile(tiles.of_slice) {
    sums.clear();
  }
  /** To the slice of a tile: sums of those before are left. All lanes. */
  __device__ __forceinline__ void advance(int tile, const Tiles& tiles, SliceMasses& out);
};

/** Where the estimates of a head go, and what they are made with. */
struct EstimateOutput {
  float* logits;  // (4, ...) of candidates, `stride` apart
  int stride;     // four of them are less than 2^31
  int heads;      // of four
  float softcap;
  float log_weight;   // samples count e^log_weight times, and only in the sums
  BlockSteps blocks;  // logits of means, from the first of these heads on
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
                                         SliceMasses& slices);

/** Several masses, added in order. */
template <int kCount>
__device__ __forceinline__ Mass sum_of(const Mass (&masses)[kCount]);

}  // namespace pariskv::cuda::device
