/**
 * The error of a head, when its rows are attended to: the rows of its tail that are not selected
 * have shares of the output, and the sum of their squares says what the sample has added
 * (policy/pariskv/budget.h). Logits of all of them are in scratch.
 *
 * | step | by | when |
 * | --- | --- | --- |
 * | `weigh_and_tell` | each block, of its candidates | they are weighed |
 * | `ErrorSums::select` | each block, of its rows | they are selected |
 * | `square_tail` | each block, of a part of the tail | its selected rows are coming |
 * | `judge_tail` | the first block of a cluster | all outputs are written |
 *
 * Squares are whole numbers, so the blocks' sums are the same in any order, and what is taken back
 * is what was added.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/tiles.cuh"
#include "pariskv/decode/attend/budget.cuh"

namespace pariskv::cuda::device {

/** A square of 1, as it is counted: 2^15 rows fit. */
constexpr float kTailUnits = 0x1p48f;

/** The tail of a head, in scratch. */
struct TailLogits {
  const float* logits;  // (rows, group)
  const float* parts;   // (kParts, group, row): first the largest logit of a part
  int rows, group;
  int64_t row;         // 2 + value_dim
  ErrorParts* errors;  // (group)
};

/** Heads whose squares are summed at once. */
constexpr int kHeadsSquared = 4;

/** Logits of a row for heads from `from` on; of none where i is negative. */
struct HeadLogits {
  float of[kHeadsSquared];

  __device__ __forceinline__ HeadLogits(const TailLogits& tail, int i, int from) {
    const float* logits = tail.logits + int64_t(i) * tail.group + from;
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      of[h] = i >= 0 && from + h < tail.group ? __ldcg(logits + h) : -infinity();
    }
  }
};

/** The largest logits of heads from `from` on: of a part each, in lanes that have one. */
struct HeadTops {
  float of[kHeadsSquared];

  __device__ __forceinline__ HeadTops(const TailLogits& tail, int from) {
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      const bool has = lane_id() < kParts && from + h < tail.group;
      of[h] =
          has ? __ldcg(tail.parts + (lane_id() * tail.group + from + h) * tail.row) : -infinity();
    }
  }
  /** Of all parts. */
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) of[h] = largest_of_warp(of[h]);
  }
  __device__ __forceinline__ uint64_t square(const HeadLogits& logits, int h) const {
    const float one = exp_of(logits.of[h] - of[h]);
    return of[h] == -infinity() ? 0 : uint64_t(one * one * kTailUnits);
  }
};

/**
 * Adds the squares of this block's part of the tail, and takes those of its selected rows back,
 * whichever part they are in. A function of its own, as `rows_within`. All threads.
 * @param selected  (count) of this block
 */
inline __device__ __noinline__ void square_tail(const TailLogits tail, const Cluster cluster,
                                                const SelectedRow* selected, int count) {
  const int begin = tail.rows * cluster.rank / cluster.size;
  const int rows = tail.rows * (cluster.rank + 1) / cluster.size - begin;
  const int thread = int(threadIdx.x);
  const auto sampled = [&](int i) { return i < rows ? begin + i : -1; };
  const auto taken = [&](int i) { return i < count ? (selected[i].where >> 8) - 1 : -1; };
#pragma unroll 1
  for (int from = 0; from < tail.group; from += kHeadsSquared) {
    // Asked for together: most often one trip to memory.
    HeadLogits more(tail, sampled(thread), from), less(tail, taken(thread), from);
    HeadTops tops(tail, from);
    tops.settle();
    uint64_t sums[kHeadsSquared] = {};
#pragma unroll 1
    for (int i = thread + kThreads;; i += kThreads) {
#pragma unroll
      for (int h = 0; h < kHeadsSquared; ++h)
        sums[h] += tops.square(more, h) - tops.square(less, h);
      if (i - thread >= max(rows, count)) break;
      more = HeadLogits(tail, sampled(i), from);
      less = HeadLogits(tail, taken(i), from);
    }
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      if (from + h >= tail.group) continue;
      ErrorParts& parts = tail.errors[from + h];
      if (cluster.rank == 0 && thread == 0) parts.top = tops.of[h];
      add_of_warp(reinterpret_cast<unsigned long long&>(parts.squares), sums[h]);
    }
  }
}

/** What a head's error is made of, when its rows are chosen. */
struct ErrorLeft {
  ErrorBudget budget;
  uint64_t mass;     // of the resident and the selected rows
  uint64_t squares;  // of candidates that are left

  /** Adds up the totals of all blocks. A warp. */
  __device__ __forceinline__ ErrorLeft(const ErrorBudget& of, const uint64_t* totals,
                                       const Cluster& cluster)
      : budget(of) {
    const auto* from = reinterpret_cast<const unsigned long long*>(totals) + lane_id();
    const bool has = lane_id() < cluster.size;
    squares = has ? __ldcg(from) : 0, mass = has ? __ldcg(from + kMaxCluster) : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      squares += __shfl_xor_sync(~0u, squares, step);
      mass += __shfl_xor_sync(~0u, mass, step);
    }
    mass += budget.resident;
  }
};

/**
 * What the sample has added to the outputs. By a warp of one block, when all blocks have added
 * their squares.
 * @param weight  keys that a row stands for
 */
__device__ __forceinline__ float judge_tail(const TailLogits& tail, float weight,
                                            const ErrorLeft& left) {
  float sum = 0;
#pragma unroll 1
  for (int head = lane_id(); head < tail.group; head += 32) {
    const ErrorParts& parts = tail.errors[head];
    const float all = __ldcg(&parts.log_sum), top = __ldcg(&parts.top);
    const uint64_t squares = __ldcg(reinterpret_cast<const unsigned long long*>(&parts.squares));
    if (!finite(all) || top == -infinity()) continue;
    const float share = weight * exp_of(top - all);  // of the largest row
    sum += float(squares) * (1 / kTailUnits) * share * share;
  }
  sum = warp_sum(sum);
  return left.budget.variance(left.squares, square_of(sum * __frcp_rn(float(tail.group))));
}

}  // namespace pariskv::cuda::device
