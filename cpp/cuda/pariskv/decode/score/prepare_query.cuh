/**
 * The query side of a search, a warp per searcher: rotated, quantised, brought to logits less what
 * the head sees in all, or turned to votes. The same steps as cpu/verbs/prepare_query.cpp, equal
 * bit for bit: every rounding is written out.
 */
#pragma once

#include "codec/head_scale.h"
#include "device/partition.cuh"
#include "pariskv/decode/query.cuh"
#include "pariskv/decode/statistics.cuh"
#include "pariskv/decode/steps.cuh"
#include "policy/pariskv/rules.h"

namespace pariskv::cuda::device {

/** Searchers are prepared this many at a time; more come in further rounds. */
template <int kWords>
constexpr int kQueries = 8;

/** Bits of a quantised element: two's complement, the last plane counts -16. */
constexpr int kPlanes = 5;

/** Where a head's logits lie, in octaves; as in codec/head_scale.h. */
struct HeadScale {
  float slope;  // of a logit in dot * norm
  float lift;   // in norm^2
  float mean;   // of the zone's keys
  float spread;
  float total;  // the log-sum-exp of the zone, and then of the window too
};

/** What a search needs of its queries. `kWords` is 32-bit words of sign bits: dimensions / 32. */
template <int kWords>
struct Queries {
  static constexpr int kCount = kQueries<kWords>;
  alignas(16) float rotated[kCount][32 * kWords];  // without the 1 / sqrt of the rotation
  uint32_t planes[kCount][kPlanes + 1][kWords];    // of the quantised query; the last is zero
  float gain[kCount];                              // of a product, over 256: a score is at most 1
  float lift[kCount], offset[kCount];
  HeadScale scales[kCount];
  float windows[kCount];  // the log-sum-exps of heads over their windows
  int sum[kCount];        // of the quantised query
  int whole[kCount];      // 0: the query is not finite

  /** No query, by a warp. */
  __device__ __forceinline__ void clear(int slot) {
    auto* words = &planes[slot][0][0];
    for (int i = lane_id(); i < (kPlanes + 1) * kWords; i += 32) words[i] = 0;
    if (lane_id() > 0) return;
    sum[slot] = whole[slot] = 0;
    scales[slot] = {};
  }
};

/** The score of the leading head's average key. */
constexpr float kMiddleScore = float(kScoreShift * kScoreSteps);

/** Sums over the dimensions of a quantised query. */
struct QuerySums {
  int64_t with_means;  // times the sums of keys
  int64_t common;      // squares, times the squared means of keys
  int square, sum;
};

/** Planes of the quantised query, and its sums; a step of it is `step` of the query. */
template <int kWords>
__device__ __forceinline__ QuerySums quantise(const float (&x)[kWords],
                                              const KnownStatistics<kWords>& statistics, double one,
                                              Queries<kWords>& out, int slot, float& step) {
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
    const int64_t sum = statistics.sums[32 * r + lane_id()];
    const int64_t mean = int64_t(rint(__dmul_rn(double(sum), one)));
    sums.with_means += sum * q;
    sums.common += mean * mean * (q * q);
    sums.square += q * q;
    sums.sum += q;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t bits = __ballot_sync(~0u, q >> plane & 1);
      if (lane_id() == plane) out.planes[slot][plane][r] = bits;
    }
  }
  sums.with_means = warp_sum(sums.with_means);
  sums.common = warp_sum(sums.common);
  sums.square = __reduce_add_sync(~0u, sums.square);
  sums.sum = __reduce_add_sync(~0u, sums.sum);
  return sums;
}

/** The scale of a head over the zone, from sums; `one` is one over the number of keys. */
__device__ __forceinline__ HeadScale scale_of_zone(const QuerySums& sums, int64_t keys,
                                                   int64_t square_units, double one, float step,
                                                   float scale, int rotated_dim) {
  if (keys == 0) return {};
  const double mean_square = __dmul_rn(double(square_units), one);
  const double variance =
      __dsub_rn(__dmul_rn(double(sums.square), mean_square), double(sums.common));
  const double mean = __dmul_rn(__dmul_rn(double(sums.with_means), one), kNormUnit);
  const float slope = __fmul_rn(__fmul_rn(scale, step), __fdiv_rn(kOctaves, float(rotated_dim)));
  const float square_slope = __fmul_rn(slope, slope);
  HeadScale of;
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

/** The head whose mean key gets the largest share of it: scores of all heads are in its spreads. */
struct Lead {
  float anchor = -infinity();  // that share: mean less the log-sum-exp of all
  float spread = kLeastSpread;

  template <int kWords>
  __device__ __forceinline__ void consider(const Queries<kWords>& queries, int count) {
#pragma unroll 1
    for (int slot = 0; slot < count; ++slot) {
      const HeadScale& of = queries.scales[slot];
      const float share = __fsub_rn(of.mean, of.total);
      if (queries.whole[slot] == 0 || !(share > anchor)) continue;
      anchor = share;
      spread = of.spread > kLeastSpread ? of.spread : kLeastSpread;
    }
  }
};

/** What scores are made with. All threads; ends with a barrier. */
template <int kWords>
__device__ __forceinline__ void settle(Queries<kWords>& queries, const Lead& lead) {
  const int slot = int(threadIdx.x);
  if (slot < Queries<kWords>::kCount) {
    const HeadScale of = queries.scales[slot];
    const float per_octave = __fdiv_rn(float(kScoreSteps), lead.spread);
    float gain = __fmul_rn(of.slope, per_octave), lift = __fmul_rn(of.lift, per_octave);
    float offset = __fsub_rn(kMiddleScore, __fmul_rn(__fadd_rn(of.total, lead.anchor), per_octave));
    if (!finite(gain) || !finite(lift) || !finite(offset)) gain = lift = 0, offset = kMiddleScore;
    if (queries.whole[slot] == 0) gain = lift = offset = 0;
    queries.gain[slot] = gain * 0x1p-8f;
    queries.lift[slot] = lift * 0x1p-8f;
    queries.offset[slot] = offset * 0x1p-8f;
  }
  __syncthreads();
}

/**
 * Rotates searchers [first, first + kCount) of a head, a warp each; those past `searchers` are not
 * whole. All threads; to be followed by a barrier.
 * @param load  load(slot, x): what a lane has of the query
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
