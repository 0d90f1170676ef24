/** Definitions of prepare_query.cuh. */
#pragma once

#include "codec/head_scale.h"
#include "device/numbers.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/query.cuh"
#include "pariskv/decode/score/prepare_query.cuh"
#include "pariskv/decode/steps.cuh"

namespace pariskv::cuda::device {

/** The score of the leading head's average key. */
constexpr float kMiddleScore = float(kScoreShift * kScoreSteps);

template <int kWords>
__device__ __forceinline__ void Queries<kWords>::clear(int slot) {
  auto* words = &planes[slot][0][0];
  for (int i = lane_id(); i < (kPlanes + 1) * kWords; i += 32) words[i] = 0;
  if (lane_id() > 0) return;
  sum[slot] = whole[slot] = 0;
  scales[slot] = {};
}

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
  of.lift = __fmul_rn(__fmul_rn(square_slope, float(sums.square)), kSignVariance);
  of.mean = __fadd_rn(__fmul_rn(slope, float(mean)),
                      __fmul_rn(of.lift, float(__dmul_rn(mean_square, kNormUnit * kNormUnit))));
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

/** As in codec/head_scale.h. */
__device__ __forceinline__ float reached_variance(float variance_term, float mean_square) {
  const float variance = __fmul_rn(__fmul_rn(variance_term, mean_square), kTwoNatural);
  if (!(variance > kSignReach * kSignReach)) return variance_term;
  const float part = __fdiv_rn(kSignReach, __fsqrt_rn(variance));
  return __fmul_rn(variance_term, __fmul_rn(part, __fsub_rn(2.0f, part)));
}

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
  of.lift = reached_variance(__fmul_rn(__fmul_rn(square_slope, float(square)), kSignVariance),
                             mean_square);

  const double inverse = __ddiv_rn(1.0, double(blocks.blocks));
  const double mean = __dmul_rn(double(blocks.sum), inverse);
  const double variance =
      __dsub_rn(__dmul_rn(double(blocks.squares), inverse), __dmul_rn(mean, mean));
  const float within = __fmul_rn(__fmul_rn(square_slope, float(square)), mean_square);
  const float inner = __fsqrt_rn(within);
  of.mean = __fadd_rn(float(__dmul_rn(mean, 0x1p-6)), __fmul_rn(of.lift, mean_square));
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

template <int kWords>
__device__ __forceinline__ void Lead::consider(const Queries<kWords>& queries, int count) {
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

template <int kWords>
__device__ __forceinline__ void settle(Queries<kWords>& queries, const Lead& lead, int searchers) {
  const int slot = int(threadIdx.x);
  if (slot < Queries<kWords>::kCount) {
    const HeadScale of = queries.scales[slot];
    const float per_octave = __fdiv_rn(float(kScoreSteps), lead.spread);
    float gain = __fmul_rn(of.slope, per_octave), lift = __fmul_rn(of.lift, per_octave);
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
    if (!finite(gain) || !finite(lift) || !finite(offset)) {
      gain = lift = per_step = 0, offset = kMiddleScore;
    }
    if (queries.whole[slot] == 0) gain = lift = per_step = offset = 0;
    queries.per_step[slot] = per_step * 0x1p-8f;
    queries.gain[slot] = gain * 0x1p-8f;
    queries.lift[slot] = lift * 0x1p-8f;
    queries.offset[slot] = offset * 0x1p-8f;
  }
  __syncthreads();
}

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
