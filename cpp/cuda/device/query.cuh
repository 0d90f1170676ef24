/**
 * The query side of a search, a warp per searcher: rotated, quantised, brought to a common scale
 * or turned to votes. The same steps as cpu/verbs/prepare_query.cpp, equal bit for bit: every
 * rounding is written out.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/numbers.cuh"

namespace pariskv::cuda::device {

/** Searchers are prepared this many at a time; more come in further rounds. */
template <int kWords>
constexpr int kQueries = 8;

/** Bits of a quantised element: two's complement, the last plane counts -16. */
constexpr int kPlanes = 5;

/** What a search needs of its queries. `kWords` is 32-bit words of sign bits: dimensions / 32. */
template <int kWords>
struct Queries {
  static constexpr int kCount = kQueries<kWords>;
  float rotated[kCount][32 * kWords];            // without the 1 / sqrt of the rotation
  uint32_t planes[kCount][kPlanes + 1][kWords];  // of the quantised query; the last is zero
  float gain[kCount];  // of a common scale, over 256: a score is at most 1
  float offset[kCount];
  int sum[kCount];    // of the quantised query
  int whole[kCount];  // 0: the query is not finite
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
constexpr double kSteps = 16;     // scores per spread
constexpr double kShift = 4;      // spreads from the lowest score to the mean
constexpr double kUnit = 0x1p-9;  // of a norm

/** What a lane needs of the statistics, asked for before it is needed. */
template <int kWords>
struct KnownStatistics {
  int64_t sums[kWords], usable, square_units;

  __device__ __forceinline__ void load(const HeadStatistics& statistics) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) sums[r] = statistics.sums[32 * r + lane_id()];
    usable = *statistics.usable;
    square_units = *statistics.square_units;
  }
};

template <int kWords>
__device__ __forceinline__ void quantise(const float (&x)[kWords],
                                         const KnownStatistics<kWords>& statistics, bool whole,
                                         Queries<kWords>& out, int slot) {
  const double usable = double(statistics.usable);
  const double mean_square = double(statistics.square_units) / usable;  // early: it takes long
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) largest = fmaxf(largest, fabsf(x[r]));
  largest = warp_max(largest);
  const float steps = largest > 0 ? __fdiv_rn(float(kLevels), largest) : 0.0f;
  const float step = finite(steps) ? steps : 0.0f;

  int64_t dot = 0;
  int square = 0, sum = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    const int q = int(rintf(__fmul_rn(x[r], step)));
    dot += statistics.sums[r] * q;
    square += q * q;
    sum += q;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t bits = __ballot_sync(~0u, q >> plane & 1);
      if (lane_id() == plane) out.planes[slot][plane][r] = bits;
    }
  }
  dot = warp_sum(dot);
  square = __reduce_add_sync(~0u, square);
  sum = __reduce_add_sync(~0u, sum);
  if (lane_id() != 0) return;

  // Exact until the last division, then in the order of the CPU.
  const double variance = __dmul_rn(double(square), mean_square);
  float gain = 0, offset = 0;
  if (whole && !(variance > 0)) offset = float(kShift * kSteps);
  if (whole && variance > 0) {
    const double exact = kSteps / __dmul_rn(__dsqrt_rn(variance), kUnit);
    const double mean = __dmul_rn(double(dot) / usable, kUnit);
    gain = float(exact);
    offset = float(__dsub_rn(kShift * kSteps, __dmul_rn(mean, exact)));
  }
  out.gain[slot] = gain * 0x1p-8f;
  out.offset[slot] = offset * 0x1p-8f;
  out.sum[slot] = sum;
}

/**
 * Prepares searchers [first, first + kCount) of a head; those past `searchers` score nothing.
 * All threads; ends with a barrier.
 */
template <int kWords, typename Element, typename RowsOf>
__device__ __forceinline__ void prepare_queries(const HeadStatistics& statistics,
                                                const uint32_t* negative, int first, int searchers,
                                                bool votes, RowsOf rows_of, Queries<kWords>& out) {
  static_assert(Queries<kWords>::kCount == kWarps);
  const int slot = warp_id();
  float x[kWords] = {};
  bool whole = false;
  KnownStatistics<kWords> known;
  if (!votes) known.load(statistics);
  if (first + slot < searchers) {
    load_query<Element, kWords>(rows_of(first + slot), x);
    whole = rotate<kWords>(negative, x);
  }
#pragma unroll
  for (int r = 0; r < kWords; ++r) out.rotated[slot][32 * r + lane_id()] = x[r];
  if (lane_id() < kWords) out.planes[slot][kPlanes][lane_id()] = 0;
  if (lane_id() == 0) out.whole[slot] = whole;
  if (!votes) quantise<kWords>(x, known, whole, out, slot);
  __syncthreads();
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
