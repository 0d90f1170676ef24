/**
 * The query side of a search, a warp per searcher: rotated, quantised, brought to logits less what
 * the head sees in all, or turned to votes. The same steps as cpu/verbs/prepare_query.cpp, equal
 * bit for bit: every rounding is written out.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/resident.cuh"

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

/** Statistics of the zone's keys for one head. */
struct HeadStatistics {
  const int64_t* usable;
  const int64_t* square_units;
  const int64_t* sums;    // (rotated dimensions)
  const int32_t* counts;  // (subspaces, 256); null: not kept
};

/** The rows of q that one searcher stands for. */
template <typename Element>
struct QueryRows {
  const Element* first;
  int64_t stride;  // in elements
  int members;     // one, or the group whose mean is taken
  bool mean;
  int head_dim;
};

/** Element r of a lane is dimension 32 r + lane. */
template <typename Element, int kWords>
__device__ __forceinline__ void load_query(const QueryRows<Element>& rows, float (&x)[kWords]) {
#pragma unroll 1
  for (int g = 0; g < rows.members; ++g) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const int d = 32 * r + lane_id();
      if (d < rows.head_dim) x[r] = __fadd_rn(x[r], to_float(rows.first[g * rows.stride + d]));
    }
  }
  if (!rows.mean) return;
#pragma unroll
  for (int r = 0; r < kWords; ++r) x[r] = __fdiv_rn(x[r], float(rows.members));
}

/** H diag(s) x; false, and all zero, when that is not finite. */
template <int kWords>
__device__ __forceinline__ bool rotate(const uint32_t* negative, float (&x)[kWords]) {
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    if (negative[r] >> lane_id() & 1) x[r] = -x[r];
  }
#pragma unroll
  for (int half = 1; half < 32; half *= 2) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const float other = __shfl_xor_sync(~0u, x[r], half);
      x[r] = lane_id() & half ? __fsub_rn(other, x[r]) : __fadd_rn(x[r], other);
    }
  }
#pragma unroll
  for (int half = 1; half < kWords; half *= 2) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      if (r & half) continue;
      const float a = x[r], b = x[r + half];
      x[r] = __fadd_rn(a, b);
      x[r + half] = __fsub_rn(a, b);
    }
  }
  bool whole = true;
#pragma unroll
  for (int r = 0; r < kWords; ++r) whole = whole && finite(x[r]);
  whole = __all_sync(~0u, whole);
  if (!whole) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) x[r] = 0;
  }
  return whole;
}

/** Largest whole number of a quantised query: kQueryLevels of the CPU. */
constexpr int kLevels = 15;
constexpr float kSteps = 16;      // scores per spread
constexpr float kMeanScore = 64;  // of the leading head
constexpr double kUnit = 0x1p-9;  // of a norm
constexpr float kLeastSpread = 0x1p-6f;
constexpr float kOctaves = 1.44269504f;  // of a unit of a logit; see codec/head_scale.h
constexpr float kNatural = 0.693147f, kTwoNatural = 1.386294f, kHalfOctaves = 0.721348f;
constexpr float kSignVariance = 0.125939f;

/** What is needed of the statistics, in shared memory. */
template <int kWords>
struct KnownStatistics {
  alignas(16) int64_t sums[32 * kWords];
  int64_t usable, square_units;

  /** Asks for it, by a warp; to be followed by a commit, a wait and a barrier. */
  __device__ __forceinline__ void stage(const HeadStatistics& statistics) {
    const auto* from = reinterpret_cast<const uint4*>(statistics.sums);
    const uint32_t to = shared_address(sums) + 16 * lane_id();
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      ptx::cp_async_cg_16(to + 32 * 16 * i, from + 32 * i + lane_id());
    }
    if (lane_id() == 0) ptx::cp_async_ca(&usable, statistics.usable);
    if (lane_id() == 1) ptx::cp_async_ca(&square_units, statistics.square_units);
  }
};

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
  const float steps = largest > 0 ? __fdiv_rn(float(kLevels), largest) : 0.0f;
  const float factor = finite(steps) ? steps : 0.0f;
  step = __fdiv_rn(largest, float(kLevels));

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
  const double mean = __dmul_rn(__dmul_rn(double(sums.with_means), one), kUnit);
  const float slope = __fmul_rn(__fmul_rn(scale, step), __fdiv_rn(kOctaves, float(rotated_dim)));
  const float square_slope = __fmul_rn(slope, slope);
  HeadScale of;
  of.slope = slope;
  of.lift = __fmul_rn(__fmul_rn(square_slope, float(sums.square)), kSignVariance);
  of.mean = __fadd_rn(__fmul_rn(slope, float(mean)),
                      __fmul_rn(of.lift, float(__dmul_rn(mean_square, kUnit * kUnit))));
  of.spread = __fsqrt_rn(
      __fmul_rn(square_slope, float(__dmul_rn(variance > 0 ? variance : 0.0, kUnit * kUnit))));
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
    const float per_octave = __fdiv_rn(kSteps, lead.spread);
    float gain = __fmul_rn(of.slope, per_octave), lift = __fmul_rn(of.lift, per_octave);
    float offset = __fsub_rn(kMeanScore, __fmul_rn(__fadd_rn(of.total, lead.anchor), per_octave));
    if (!finite(gain) || !finite(lift) || !finite(offset)) gain = lift = 0, offset = kMeanScore;
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

/** Sorts 256 numbers, upwards; lane holds elements 8 lane + r. A bitonic network. */
__device__ __forceinline__ void sort_in_warp(uint64_t (&key)[8]) {
#pragma unroll 1
  for (int block = 2; block <= 256; block *= 2) {
#pragma unroll 1
    for (int step = block / 2; step >= 8; step /= 2) {
      const bool low = (lane_id() & (step / 8)) == 0;
      const bool upwards = (lane_id() & (block / 8)) == 0;  // block is 16 or more here
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const uint64_t other = __shfl_xor_sync(~0u, key[r], step / 8);
        const bool smaller = key[r] < other;
        key[r] = (low == upwards) == smaller ? key[r] : other;
      }
    }
#pragma unroll
    for (int step = 4; step >= 1; step /= 2) {
      if (step >= block) continue;
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (r & step) continue;
        const bool upwards = ((8 * lane_id() + r) & block) == 0;
        const uint64_t a = key[r], b = key[r + step];
        const bool swap = (a < b) != upwards;
        key[r] = swap ? b : a;
        key[r + step] = swap ? a : b;
      }
    }
  }
}

/**
 * The votes of one subspace's 256 centroids, by a warp: from the nearest to the query down, a
 * centroid gets one vote for every tier in which the keys before it leave room.
 * @param part    (8) of the rotated query
 * @param counts  (256) keys per centroid
 * @param votes   (256) written
 */
__device__ __forceinline__ void cast_votes(const float* part, const int32_t* counts, int64_t keys,
                                           double vote_ratio, uint8_t* votes) {
  uint64_t key[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int id = 8 * lane_id() + r;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fadd_rn(sum, id >> j & 1 ? part[j] : -part[j]);
    key[r] = uint64_t(~sortable(sum)) << 32 | uint32_t(id);
  }
  sort_in_warp(key);

  int count[8], sum = 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) sum += count[r] = counts[uint32_t(key[r]) & 255];
  int before = lanes_before(sum);

  constexpr double kTiers[] = {.05, .15, .30, .50, .75, 1};
  int room[6];
#pragma unroll
  for (int t = 0; t < 6; ++t) {
    room[t] = int(ceil(__dmul_rn(__dmul_rn(double(keys), vote_ratio), kTiers[t])));
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    int tiers = 0;
#pragma unroll
    for (int t = 0; t < 6; ++t) tiers += before < room[t];
    votes[uint32_t(key[r]) & 255] = uint8_t(tiers);
    before += count[r];
  }
}

}  // namespace pariskv::cuda::device
