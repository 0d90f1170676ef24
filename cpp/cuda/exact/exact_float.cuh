/**
 * Exact attention in 32 bits. A warp owns a few queries; for logits a lane takes a row of the tile,
 * for weighted sums some dimensions of all rows.
 */
#pragma once

#include "exact/exact.cuh"

namespace pariskv::cuda::device {

constexpr int kFloatThreads = 128;
/** Rows of a tile, and queries of a warp: many dimensions leave room for fewer. */
template <int kDim>
constexpr int kFloatRows = kDim > 256 ? 16 : 32;
template <int kDim>
constexpr int kFloatQueries = kDim > 256   ? 2
                              : kDim > 128 ? 4
                                           : 8;

/** A block's shared memory. */
template <int kDim>
struct FloatTiles {
  static constexpr int kPitch =
      2 * kDim + 4;  // floats: four more, so that eight rows meet all banks
  float rows[kFloatRows<kDim>][kPitch];
  float queries[kFloatThreads / 32][kFloatQueries<kDim>][kDim];
  float weights[kFloatThreads / 32][kFloatQueries<kDim>][kFloatRows<kDim>];
};

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/** With kPadded, keys and values have key_dim and value_dim of the kDim dimensions. */
template <int kDim, bool kPadded>
__global__ void __launch_bounds__(kFloatThreads) attend_exact_float(ExactParameters p) {
  constexpr int kQueries = kFloatQueries<kDim>, kWarps = kFloatThreads / 32;
  constexpr int kRows = kFloatRows<kDim>;
  constexpr int kWords = (kDim + 31) / 32;  // dimensions of a lane: lane, lane + 32, ...
  extern __shared__ uint4 staged[];
  FloatTiles<kDim>& tiles = *reinterpret_cast<FloatTiles<kDim>*>(staged);
  const int head = int(blockIdx.y), warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int64_t block = exact_first_query(p, kWarps * kQueries);
  const int64_t own = block + warp * kQueries;
  float (&queries)[kQueries][kDim] = tiles.queries[warp];
  float (&weights)[kQueries][kRows] = tiles.weights[warp];

  int limits[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    const ExactQuery query(p, head, own + i);
    limits[i] = query.limit;
    for (int d = lane; d < kDim; d += 32) {
      const bool there = limits[i] > 0 && (!kPadded || d < p.key_dim);
      queries[i][d] = there ? query.template input<float>(p)[d] : 0.0f;
    }
  }
  const int64_t last = min(block + kWarps * kQueries, p.tokens * p.group) - 1;
  const ExactRows rows(p, last);
  if (rows.empty() && p.resumes) return;
  float maximum[kQueries], sum[kQueries] = {}, weighted[kQueries][kWords] = {};
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    maximum[i] = -infinity();
    if (!p.resumes || limits[i] == 0) continue;
    const float* state = exact_state(p, blockIdx.z, gridDim.y, head, own + i, kDim);
    maximum[i] = state[0], sum[i] = state[1];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (lane + 32 * w < kDim) weighted[i][w] = state[kStateWeighted + lane + 32 * w];
    }
  }

  for (int first = rows.first; first < rows.end; first = rows.next(p, first, kRows)) {
    __syncthreads();
    stage_rows<float, kDim, kPadded, kRows, FloatTiles<kDim>::kPitch * 4, kFloatThreads>(
        p, head, first, rows.end, shared_address(&tiles.rows));
    ptx::cp_async_wait_group<0>();
    __syncthreads();

    float logits[kQueries] = {};
    const float4* key = reinterpret_cast<const float4*>(tiles.rows[lane % kRows]);
#pragma unroll 4
    for (int d = 0; d < kDim / 4; ++d) {
      const float4 k = key[d];
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        const float4 q = reinterpret_cast<const float4*>(queries[i])[d];
        logits[i] = fmaf(q.x, k.x, logits[i]);
        logits[i] = fmaf(q.y, k.y, logits[i]);
        logits[i] = fmaf(q.z, k.z, logits[i]);
        logits[i] = fmaf(q.w, k.w, logits[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const bool visible = lane < kRows && first + lane < limits[i];
      const float logit = capped(logits[i] * p.scale, p.softcap);
      const float top = fmaxf(maximum[i], largest_of_warp(visible ? logit : -infinity()));
      const float rescale = maximum[i] == top ? 1.0f : expf(maximum[i] - top);
      const float weight = visible ? expf(logit - top) : 0.0f;
      maximum[i] = top;
      sum[i] = fmaf(sum[i], rescale, sum_of_warp(weight));
      if (lane < kRows) weights[i][lane] = weight;
#pragma unroll
      for (int w = 0; w < kWords; ++w) weighted[i][w] *= rescale;
    }
    __syncwarp();
    for (int r = 0; r < min(kRows, rows.end - first); ++r) {
      float value[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int d = lane + 32 * w;
        value[w] = d < kDim ? tiles.rows[r][kDim + d] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (first + r >= limits[i]) continue;  // a weight of 0 would not hide a NaN
        const float weight = weights[i][r];
#pragma unroll
        for (int w = 0; w < kWords; ++w) weighted[i][w] = fmaf(weight, value[w], weighted[i][w]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    if (limits[i] == 0) continue;
    if (p.states != nullptr) {
      float* state = exact_state(p, blockIdx.z, gridDim.y, head, own + i, kDim);
      if (lane < kStateWeighted) state[lane] = lane == 0 ? maximum[i] : lane == 1 ? sum[i] : 0.0f;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (lane + 32 * w < kDim) state[kStateWeighted + lane + 32 * w] = weighted[i][w];
      }
      continue;
    }
    const ExactQuery query(p, head, own + i);
    const float share = finish(p, query, maximum[i], sum[i], lane == 0);
    if (p.out == nullptr) continue;
    float* out = query.template output<float>(p);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int d = lane + 32 * w;
      if (d < (kPadded ? p.value_dim : kDim)) out[d] = finite_or_nan(weighted[i][w] * share);
    }
  }
}

}  // namespace pariskv::cuda::device
