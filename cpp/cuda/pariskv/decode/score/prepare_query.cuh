/**
 * The query side of a search, a warp per searcher: rotated, quantised, brought to logits less what
 * the head sees in all, or turned to votes. The same steps as cpu/verbs/prepare_query.cpp, equal
 * bit for bit: every rounding is written out. Definitions are in prepare_query_impl.cuh.
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
  float total;  // the log-sum-exp of the zone, then of the window too, then less the start
  float start;
  float top;  // of the best block's keys; minus infinity: unknown
};

/** What a search needs of its queries. `kWords` is 32-bit words of sign bits: dimensions / 32. */
template <int kWords>
struct Queries {
  static constexpr int kCount = kQueries<kWords>;
  alignas(16) float rotated[kCount][32 * kWords];  // without the 1 / sqrt of the rotation
  uint32_t planes[kCount][kPlanes + 1][kWords];    // of the quantised query; the last is zero
  float gain[kCount];                              // of a product, over 256: a score is at most 1
  float lift[kCount];
  alignas(8) float offset[kCount];    // both are read by twos
  alignas(8) float per_step[kCount];  // of a block's logit in steps
  HeadScale scales[kCount];
  float windows[kCount];  // the log-sum-exps of heads over their windows
  int sum[kCount];        // of the quantised query
  int whole[kCount];      // 0: the query is not finite
  int octave;             // steps, see joined_score

  /** No query, by a warp. */
  __device__ __forceinline__ void clear(int slot);
};

/** Sums over the dimensions of a quantised query. */
struct QuerySums {
  int64_t with_means;  // times the sums of keys; 0 where there are blocks
  int64_t common;      // squares, times the squared means of keys
  int square, sum;
};

/** Planes of the quantised query, and its sums, by a warp; a step of it is `step` of the query. */
template <int kWords, bool kBlocks>
__device__ __forceinline__ QuerySums quantise(const float (&x)[kWords],
                                              const KnownStatistics<kWords, kBlocks>& statistics,
                                              double one, Queries<kWords>& out, int slot,
                                              float& step);

/** The scale of a head over the zone, from sums; `one` is one over the number of keys. */
__device__ __forceinline__ HeadScale scale_of_zone(const QuerySums& sums, int64_t keys,
                                                   int64_t square_units, double one, float step,
                                                   float scale, int rotated_dim);

/** The same where keys are told from the means of blocks: the zone is a mixture of these. */
__device__ __forceinline__ HeadScale scale_of_blocks(const BlockSums& blocks, int square,
                                                     int64_t keys, int64_t square_units, double one,
                                                     float step, float scale, int rotated_dim);

/** The head whose mean key gets the largest share of it: scores of all heads are in its spreads. */
struct Lead {
  float anchor = -infinity();  // that share: mean less the log-sum-exp of all
  float spread = kLeastSpread;
  float top = -infinity();  // of any head's keys, as such a share

  /** Slots [0, count) of the queries; every thread for itself. */
  template <int kWords>
  __device__ __forceinline__ void consider(const Queries<kWords>& queries, int count);
};

/** What scores are made with, of so many searchers. All threads; ends with a barrier. */
template <int kWords>
__device__ __forceinline__ void settle(Queries<kWords>& queries, const Lead& lead, int searchers);

/**
 * Rotates searchers [first, first + kCount) of a head, a warp each; those past `searchers` are not
 * whole. All threads; to be followed by a barrier.
 * @param load  load(slot, x): what a lane has of the query
 * @param then  then(slot, x) after the rotation, where there is a searcher
 */
template <int kWords, typename Load, typename Then>
__device__ __forceinline__ void prepare_queries(const uint32_t* negative, int first, int searchers,
                                                Load load, Then then, Queries<kWords>& out);

}  // namespace pariskv::cuda::device
