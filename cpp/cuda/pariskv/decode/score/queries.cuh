/**
 * The query side of a search, a warp per searcher: rotated, quantised, brought to logits less the
 * log-sum-exp of the head, or turned to votes. The same steps as cpu/pariskv/prepare_query.cpp,
 * equal bit for bit.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/partition.cuh"
#include "device/ptx.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/query.cuh"
#include "pariskv/decode/statistics.cuh"
#include "pariskv/decode/steps.cuh"
#include "pariskv/decode/sums.cuh"
#include "policy/pariskv/codec/head_scale.h"
#include "policy/pariskv/rules.h"

namespace pariskv::cuda::device {

/**
 * The log-sum-exp of the window for one head, in octaves; a warp. Waits for its rows.
 * @param rows   (kWindowRows) window words: see device/signal.cuh
 * @param token  of the step
 * @param bias  of the sink; null: none
 */
__device__ __forceinline__ float sum_window(const uint64_t* rows, uint32_t token,
                                            const float* bias) {
  constexpr int kOfLane = int(kWindowRows) / 32;
  uint64_t found[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) found[i] = load_relaxed(rows + lane_id() + 32 * i);
  int steps[kOfLane + 1];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    while (uint32_t(found[i] >> 32) != token) found[i] = load_relaxed(rows + lane_id() + 32 * i);
    steps[i] = int(uint32_t(found[i]));
  }
  steps[kOfLane] = lane_id() == 0 && bias != nullptr && finite(*bias)
                       ? steps_of(__fmul_rn(*bias, kOctaveSteps))
                       : kNoSteps;
  int most = kNoSteps;
#pragma unroll
  for (int i = 0; i <= kOfLane; ++i) most = max(most, steps[i]);
  most = __reduce_max_sync(~0u, most);
  if (most == kNoSteps) return -infinity();
  int sum = 0;
#pragma unroll
  for (int i = 0; i <= kOfLane; ++i) sum += window_weight(most - steps[i]);
  return log_of_weights(most, float(__reduce_add_sync(~0u, sum)));
}

/** Chunks of a lane that are looked at together. */
constexpr int kChunksAtOnce = 4;

/** Until the sums of all chunks are there. By a warp. */
__device__ __forceinline__ void await_chunks(const uint32_t* flags, int chunks, uint32_t token) {
#pragma unroll 1
  for (int first = lane_id(); first < chunks; first += 32 * kChunksAtOnce) {
    uint32_t found[kChunksAtOnce];
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      found[i] = first + 32 * i < chunks ? load_acquire(flags + first + 32 * i) : token;
    }
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      while (found[i] != token) found[i] = load_acquire(flags + first + 32 * i);
    }
  }
  __syncwarp();
}

/**
 * The sums of a searcher over all chunks: in every lane. By a warp.
 * @param of     of the first chunk; `pitch` from chunk to chunk
 * @param count  of blocks of keys
 */
__device__ __forceinline__ BlockSums sum_chunks(const ChunkSums* of, int chunks, int pitch,
                                                int64_t count) {
  BlockSums all{};
  int most = all.most;
#pragma unroll 4
  for (int i = lane_id(); i < chunks; i += 32) {
    most = max(most, __ldcg(&of[int64_t(i) * pitch].most));
  }
  all.most = __reduce_max_sync(~0u, most);
#pragma unroll 4
  for (int i = lane_id(); i < chunks; i += 32) {
    const ChunkSums& chunk = of[int64_t(i) * pitch];
    const int4 numbers = __ldcg(reinterpret_cast<const int4*>(&chunk));
    all.squares += __ldcg(&chunk.squares);
    all.sum += numbers.x;
    all.weight += BlockSums::lowered(numbers.z, all.most - numbers.y);
  }
  all.blocks = count;
  all.sum = warp_sum(all.sum);
  all.squares = warp_sum(all.squares);
  all.weight = warp_sum(all.weight);
  return all;
}

/** Searchers are prepared this many at a time; more come in further rounds. */
template <int kWords>
constexpr int kQueries = 8;

/** Bits of a quantised element: two's complement, the last plane counts -16. */
constexpr int kPlanes = 5;

/** The queries of a search. `kWords` is 32-bit words of sign bits: dimensions / 32. */
template <int kWords>
struct Queries {
  static constexpr int kCount = kQueries<kWords>;
  alignas(16) float rotated[kCount][32 * kWords];  // without the 1 / sqrt of the rotation
  uint32_t planes[kCount][kPlanes + 1][kWords];    // of the quantised query; the last is zero
  float gain[kCount];                              // of a product, over 256: a score is at most 1
  float variance_term[kCount];
  alignas(8) float offset[kCount];    // both are read by twos
  alignas(8) float per_step[kCount];  // of a block's logit in steps
  HeadScale scales[kCount];
  float windows[kCount];  // the log-sum-exps of heads over their windows
  int sum[kCount];        // of the quantised query
  int octave;             // steps, see joined_score

  /** By one thread, where it is known whether the query is finite. */
  __device__ __forceinline__ void set_scale(int slot, HeadScale scale) {
    scale.whole = scales[slot].whole;
    scales[slot] = scale;
  }
  /** No query, by a warp. */
  __device__ __forceinline__ void clear(int slot) {
    auto* words = &planes[slot][0][0];
    for (int i = lane_id(); i < (kPlanes + 1) * kWords; i += 32) words[i] = 0;
    if (lane_id() > 0) return;
    sum[slot] = 0;
    scales[slot] = {};
  }
};

/** Planes of the quantised query, and its sums, by a warp; a step of it is `step` of the query. */
template <int kWords, bool kBlocks>
__device__ __forceinline__ QuerySums quantise(const float (&x)[kWords],
                                              const KnownStatistics<kWords, kBlocks>& statistics,
                                              const KeyNumbers& keys, Queries<kWords>& out,
                                              int slot, float& step) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) largest = fmaxf(largest, fabsf(x[r]));
  largest = warp_max(largest);
  const float steps = largest > 0 ? __fdiv_rn(float(kQueryLevels), largest) : 0.0f;
  const float factor = finite(steps) ? steps : 0.0f;
  step = __fdiv_rn(largest, float(kQueryLevels));

  QuerySums sums{};
  int square = 0, sum = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    const int q = int(rintf(__fmul_rn(x[r], factor)));
    if constexpr (!kBlocks) {
      const int64_t of_keys = statistics.sums[32 * r + lane_id()];
      const int64_t mean = keys.nearest_mean(of_keys);
      sums.dot += of_keys * q;
      sums.common += mean * mean * (q * q);
    }
    square += q * q;
    sum += q;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t bits = __ballot_sync(~0u, q >> plane & 1);
      if (lane_id() == plane) out.planes[slot][plane][r] = bits;
    }
  }
  if constexpr (!kBlocks) {
    sums.dot = warp_sum(sums.dot);
    sums.common = warp_sum(sums.common);
  }
  sums.square = __reduce_add_sync(~0u, square);
  sum = __reduce_add_sync(~0u, sum);
  if (lane_id() == 0) out.sum[slot] = sum;
  return sums;
}

/** The factors of scores, of so many searchers. All threads; ends with a barrier. */
template <int kWords>
__device__ __forceinline__ void settle(Queries<kWords>& queries, const Lead& lead, int searchers) {
  const int slot = int(threadIdx.x);
  if (slot < Queries<kWords>::kCount) {
    const ScoreLines lines = ScoreLines::of(lead, searchers);
    if (slot == 0) queries.octave = int(lines.octave);
    const ScoreLine line = lines.line(queries.scales[slot]);
    queries.per_step[slot] = line.per_step * 0x1p-8f;
    queries.gain[slot] = line.slope * 0x1p-8f;
    queries.variance_term[slot] = line.variance_term * 0x1p-8f;
    queries.offset[slot] = line.offset * 0x1p-8f;
  }
  __syncthreads();
}

/**
 * Rotates searchers [first, first + kCount) of a head, a warp each; those past `searchers` are not
 * whole. All threads; to be followed by a barrier.
 * @param load  load(slot, x): a lane's part of the query
 * @param then  then(slot, x) after the rotation, where there is a searcher
 */
template <int kWords, typename Load, typename Then>
__device__ __forceinline__ void prepare_queries(const uint32_t* negative, int first, int searchers,
                                                Load load, Then then, Queries<kWords>& out) {
  static_assert(Queries<kWords>::kCount == kWarps);
  const int slot = warp_id();
  if (first + slot < searchers) {
    float x[kWords] = {};
    load(slot, x);
    const bool whole = rotate<kWords>(negative, x);
#pragma unroll
    for (int r = 0; r < kWords; ++r) out.rotated[slot][32 * r + lane_id()] = x[r];
    if (lane_id() < kWords) out.planes[slot][kPlanes][lane_id()] = 0;
    if (lane_id() == 0) out.scales[slot].whole = whole;
    then(slot, x);
  } else {
    out.clear(slot);
  }
}

}  // namespace pariskv::cuda::device
