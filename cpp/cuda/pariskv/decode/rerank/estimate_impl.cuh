/** Definitions of estimate.cuh. */
#pragma once

#include "codec/head_scale.h"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/rerank/codes_impl.cuh"
#include "pariskv/decode/rerank/estimate.cuh"

namespace pariskv::cuda::device {

__device__ __forceinline__ void TwoMasses::add_lanes() {
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

__device__ __forceinline__ void MassesOfWarp::advance(int tile, const Tiles& tiles,
                                                      SliceMasses& out) {
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
      masses.sums.of[i].add(candidate >= 0 ? logit : logit + out.log_weight);
    }
  }
}

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
