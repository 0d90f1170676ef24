/**
 * The query side of a search, a warp per searcher: rotated, quantised, brought to logits less the
 * log-sum-exp of the head, or turned to votes. The same steps as cpu/pariskv/prepare_query.cpp,
 * equal bit for bit: every rounding is written out.
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
 * @param rows   (kWindowRows) window words: see signal.cuh
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
  for (int i = 0; i <= kOfLane; ++i) {
    const int less = most - steps[i];
    if (less < 1024) sum += ((64 + (-less & 63)) << 10) >> ((less + 63) >> 6);
  }
  sum = __reduce_add_sync(~0u, sum);
  return __fadd_rn(__fmul_rn(float(most), 0x1p-6f), __fsub_rn(rough_log2(float(sum)), 16.0f));
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

/** Where a head's logits lie, in octaves; as in policy/pariskv/codec/head_scale.h. */
struct HeadScale {
  float slope;          // of a logit in dot * norm
  float variance_term;  // in norm^2
  float mean;           // of the zone's keys
  float spread;
  float total;  // the log-sum-exp of the zone, then of the window too, then less the start
  float start;
  float top;  // of the best block's keys; minus infinity: unknown
};

/** Sums over the dimensions of a quantised query. */
struct QuerySums {
  int64_t with_means;  // times the sums of keys; 0 where there are blocks
  int64_t common;      // squares, times the squared means of keys
  int square, sum;
};

/** The score of the leading head's average key. */
constexpr float kMiddleScore = float(kScoreShift * kScoreSteps);

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
  int whole[kCount];      // 0: the query is not finite
  int octave;             // steps, see joined_score

  /** No query, by a warp. */
  __device__ __forceinline__ void clear(int slot) {
    auto* words = &planes[slot][0][0];
    for (int i = lane_id(); i < (kPlanes + 1) * kWords; i += 32) words[i] = 0;
    if (lane_id() > 0) return;
    sum[slot] = whole[slot] = 0;
    scales[slot] = {};
  }
};

/** Planes of the quantised query, and its sums, by a warp; a step of it is `step` of the query. */
template <int kWords, bool kBlocks>
__device__ __forceinline__ QuerySums quantise(const float (&x)[kWords],
                                              const KnownStatistics<kWords, kBlocks>& statistics,
                                              double one, Queries<kWords>& out, int slot,
                                              float& step) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) largest = fmaxf(largest, fabsf(x[r]));
  largest = warp_max(largest);
  const float steps = largest > 0 ? __fdiv_rn(float(kQueryLevels), largest) : 0.0f;
  const float factor = finite(steps) ? steps : 0.0f;
  step = __fdiv_rn(largest, float(kQueryLevels));

  QuerySums sums{};
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    const int q = int(rintf(__fmul_rn(x[r], factor)));
    if constexpr (!kBlocks) {
      const int64_t sum = statistics.sums[32 * r + lane_id()];
      const int64_t mean = int64_t(rint(__dmul_rn(double(sum), one)));
      sums.with_means += sum * q;
      sums.common += mean * mean * (q * q);
    }
    sums.square += q * q;
    sums.sum += q;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t bits = __ballot_sync(~0u, q >> plane & 1);
      if (lane_id() == plane) out.planes[slot][plane][r] = bits;
    }
  }
  if constexpr (!kBlocks) {
    sums.with_means = warp_sum(sums.with_means);
    sums.common = warp_sum(sums.common);
  }
  sums.square = __reduce_add_sync(~0u, sums.square);
  sums.sum = __reduce_add_sync(~0u, sums.sum);
  return sums;
}

/** The scale of a head over the zone, from sums; `one` is one over the number of keys. */
__device__ __forceinline__ HeadScale scale_of_zone(const QuerySums& sums, int64_t keys,
                                                   int64_t square_units, double one, float step,
                                                   float scale, int rotated_dim) {
  if (keys == 0) return {};  // no score to be had
  const double mean_square = __dmul_rn(double(square_units), one);
  const double variance =
      __dsub_rn(__dmul_rn(double(sums.square), mean_square), double(sums.common));
  const double mean = __dmul_rn(__dmul_rn(double(sums.with_means), one), kNormUnit);
  const float slope = __fmul_rn(__fmul_rn(scale, step), __fdiv_rn(kOctaves, float(rotated_dim)));
  const float square_slope = __fmul_rn(slope, slope);
  HeadScale of{};
  of.top = -infinity();
  of.slope = slope;
  of.variance_term = __fmul_rn(__fmul_rn(square_slope, float(sums.square)), kSignVariance);
  of.mean =
      __fadd_rn(__fmul_rn(slope, float(mean)),
                __fmul_rn(of.variance_term, float(__dmul_rn(mean_square, kNormUnit * kNormUnit))));
  of.spread = __fsqrt_rn(__fmul_rn(
      square_slope, float(__dmul_rn(variance > 0 ? variance : 0.0, kNormUnit * kNormUnit))));
  // The log-sum-exp of normal numbers, of which there are not more than there are.
  const float count = rough_log2(float(keys));
  const float most = __fsqrt_rn(__fmul_rn(count, kTwoNatural));
  const float natural = __fmul_rn(of.spread, kNatural);
  const float w = natural < most ? natural : most;
  of.total = __fadd_rn(__fsub_rn(__fadd_rn(of.mean, __fmul_rn(w, of.spread)),
                                 __fmul_rn(__fmul_rn(w, w), kHalfOctaves)),
                       count);
  return of;
}

/** As in policy/pariskv/codec/head_scale.h. */
__device__ __forceinline__ float reached_variance(float variance_term, float mean_square) {
  const float variance = __fmul_rn(__fmul_rn(variance_term, mean_square), kTwoNatural);
  if (!(variance > kSignReach * kSignReach)) return variance_term;
  const float part = __fdiv_rn(kSignReach, __fsqrt_rn(variance));
  return __fmul_rn(variance_term, __fmul_rn(part, __fsub_rn(2.0f, part)));
}

/** The same where keys are told from the means of blocks: the zone is a mixture of these. */
__device__ __forceinline__ HeadScale scale_of_blocks(const BlockSums& blocks, int square,
                                                     int64_t keys, int64_t square_units, double one,
                                                     float step, float scale, int rotated_dim) {
  HeadScale of{};
  of.top = -infinity();
  of.total = infinity();
  if (keys == 0) return of;
  const float slope = __fmul_rn(__fmul_rn(scale, step), __fdiv_rn(kOctaves, float(rotated_dim)));
  const float square_slope = __fmul_rn(slope, slope);
  const float mean_square =
      float(__dmul_rn(__dmul_rn(double(square_units), one), kNormUnit * kNormUnit));
  of.slope = __fmul_rn(slope, kSignGain);
  of.variance_term = reached_variance(
      __fmul_rn(__fmul_rn(square_slope, float(square)), kSignVariance), mean_square);

  const double inverse = __ddiv_rn(1.0, double(blocks.blocks));
  const double mean = __dmul_rn(double(blocks.sum), inverse);
  const double variance =
      __dsub_rn(__dmul_rn(double(blocks.squares), inverse), __dmul_rn(mean, mean));
  const float within = __fmul_rn(__fmul_rn(square_slope, float(square)), mean_square);
  const float inner = __fsqrt_rn(within);
  of.mean = __fadd_rn(float(__dmul_rn(mean, 0x1p-6)), __fmul_rn(of.variance_term, mean_square));
  of.spread =
      __fsqrt_rn(__fadd_rn(within, float(__dmul_rn(variance > 0 ? variance : 0.0, 0x1p-12))));

  const float best = __fmul_rn(float(blocks.most), 0x1p-6f);
  const float keys_log = rough_log2(float(keys));
  const float farthest = __fsqrt_rn(__fmul_rn(keys_log, kTwoNatural));
  const float natural = __fmul_rn(inner, kNatural);
  const float reach = farthest < natural ? farthest : natural;
  const float average =
      __fsub_rn(__fadd_rn(best, __fsub_rn(rough_log2(float(blocks.weight)), 16.0f)),
                rough_log2(float(blocks.blocks)));
  of.total = __fadd_rn(__fsub_rn(__fadd_rn(average, __fmul_rn(reach, inner)),
                                 __fmul_rn(__fmul_rn(reach, reach), kHalfOctaves)),
                       keys_log);
  of.top = __fadd_rn(best, __fmul_rn(kBlockReach, inner));
  of.start = __fmul_rn(kHeadStart, inner);
  return of;
}

/** The head whose mean key gets the largest share of it: scores of all heads are in its spreads. */
struct Lead {
  float anchor = -infinity();  // that share: mean less the log-sum-exp of all
  float spread = kLeastSpread;
  float top = -infinity();  // of any head's keys, as such a share

  /** Slots [0, count) of the queries; every thread for itself. */
  template <int kWords>
  __device__ __forceinline__ void consider(const Queries<kWords>& queries, int count) {
#pragma unroll 1
    for (int slot = 0; slot < count; ++slot) {
      const HeadScale& of = queries.scales[slot];
      if (queries.whole[slot] == 0) continue;
      const float highest = __fsub_rn(of.top, of.total);
      if (top < highest) top = highest;
      const float share = __fsub_rn(of.mean, of.total);
      if (!(share > anchor)) continue;
      anchor = share;
      spread = of.spread > kLeastSpread ? of.spread : kLeastSpread;
    }
  }
};

/** The factors of scores, of so many searchers. All threads; ends with a barrier. */
template <int kWords>
__device__ __forceinline__ void settle(Queries<kWords>& queries, const Lead& lead, int searchers) {
  const int slot = int(threadIdx.x);
  if (slot < Queries<kWords>::kCount) {
    const HeadScale of = queries.scales[slot];
    const float per_octave = __fdiv_rn(float(kScoreSteps), lead.spread);
    float gain = __fmul_rn(of.slope, per_octave),
          variance_term = __fmul_rn(of.variance_term, per_octave);
    float per_step = __fmul_rn(per_octave, 0x1p-6f);
    const float octave = searchers > 1 ? rintf(fminf(per_octave, kMostOctave)) : 0.0f;
    if (slot == 0) queries.octave = int(octave);
    // Scores of the best block's keys that would not fit a byte lower all.
    const float most =
        __fsub_rn(255.0f - kMiddleScore, __fmul_rn(octave, float(score_joins(searchers))));
    const float excess = __fsub_rn(__fmul_rn(__fsub_rn(lead.top, lead.anchor), per_octave), most);
    const float middle =
        excess > 0 && finite(excess) ? __fsub_rn(kMiddleScore, excess) : kMiddleScore;
    float offset = __fsub_rn(middle, __fmul_rn(__fadd_rn(of.total, lead.anchor), per_octave));
    if (!finite(gain) || !finite(variance_term) || !finite(offset)) {
      gain = variance_term = per_step = 0, offset = kMiddleScore;
    }
    if (queries.whole[slot] == 0) gain = variance_term = per_step = offset = 0;
    queries.per_step[slot] = per_step * 0x1p-8f;
    queries.gain[slot] = gain * 0x1p-8f;
    queries.variance_term[slot] = variance_term * 0x1p-8f;
    queries.offset[slot] = offset * 0x1p-8f;
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
    if (lane_id() == 0) out.whole[slot] = whole;
    then(slot, x);
  } else {
    out.clear(slot);
  }
}

}  // namespace pariskv::cuda::device
