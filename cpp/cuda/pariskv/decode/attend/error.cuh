/**
 * The error of a head, when its rows are attended to: the rows of its tail that are not selected
 * have shares of the output, and the sum of their squares says what the sample has added
 * (policy/pariskv/budget.h). Logits of all of them are in scratch.
 *
 * | step | by | when |
 * | --- | --- | --- |
 * | `weigh_rest` | each block, of its candidates | its selected rows are coming |
 * | `square_tail` | each block, of a part of the tail | the same |
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

  /** Of a head's rows. A warp. */
  __device__ __forceinline__ float largest(int head) const {
    const bool has = lane_id() < kParts;
    return warp_max(has ? __ldcg(parts + (lane_id() * group + head) * row) : -infinity());
  }
};

/** Heads whose squares are summed at once: so this is one trip to memory, not one for each. */
constexpr int kHeadsSquared = 4;

struct HeadSquares {
  float tops[kHeadsSquared];
  uint64_t sums[kHeadsSquared] = {};

  /** Heads from `from` on. A warp. */
  __device__ __forceinline__ HeadSquares(const TailLogits& tail, int from) {
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      tops[h] = from + h < tail.group ? tail.largest(from + h) : -infinity();
    }
  }
  /** Row i, or less it. */
  __device__ __forceinline__ void add(const TailLogits& tail, int i, int from, bool less) {
    const float* logits = tail.logits + int64_t(i) * tail.group + from;
    float own[kHeadsSquared];
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      own[h] = tops[h] == -infinity() ? -infinity() : __ldcg(logits + h) - tops[h];
    }
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      const float one = exp_of(own[h]);
      const uint64_t square = uint64_t(one * one * kTailUnits);
      sums[h] += less ? 0 - square : square;
    }
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
  const int end = tail.rows * (cluster.rank + 1) / cluster.size;
#pragma unroll 1
  for (int from = 0; from < tail.group; from += kHeadsSquared) {
    HeadSquares squares(tail, from);
#pragma unroll 2
    for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
      squares.add(tail, i, from, false);
    }
#pragma unroll 1
    for (int i = int(threadIdx.x); i < count; i += kThreads) {
      const int number = selected[i].where >> 8;
      if (number > 0) squares.add(tail, number - 1, from, true);
    }
#pragma unroll
    for (int h = 0; h < kHeadsSquared; ++h) {
      if (from + h >= tail.group) continue;
      ErrorParts& parts = tail.errors[from + h];
      if (cluster.rank == 0 && threadIdx.x == 0) parts.top = squares.tops[h];
      add_of_block(reinterpret_cast<unsigned long long&>(parts.squares), squares.sums[h]);
    }
  }
}

/** Rows of a block that are chosen. */
struct Chosen {
  const int32_t* candidates;  // (count)
  const uint32_t* keys;       // (count) their worths, as `sortable` has them
  int count;
};

/**
 * Squares of this block's candidates that are left, and the mass of its chosen rows. A function of
 * its own, as `rows_within`. All threads; ends with a barrier.
 * @param first, count  candidates of the block
 * @param totals        (2, kMaxCluster) gets the squares and the mass
 * @param left          gets the budget
 */
inline __device__ __noinline__ void weigh_rest(const HeadMasses masses, const Cluster cluster,
                                               const ErrorAsked asked,
                                               const CandidateEstimates estimates, int first,
                                               int count, const Chosen chosen, uint64_t* totals,
                                               ErrorLeft& left, BudgetSpace& space) {
  const ErrorBudget budget = budget_of_heads(masses, asked, space);
  const Squares square{estimates, asked.group, space.all};
  uint64_t squares = 0, mass = 0;
#pragma unroll 2
  for (int i = first + int(threadIdx.x); i < first + count; i += kThreads) squares += square(i);
#pragma unroll 1
  for (int i = int(threadIdx.x); i < chosen.count; i += kThreads) {
    squares -= square(__ldcg(chosen.candidates + i));
    mass += mass_of_key(__ldcg(chosen.keys + i));
  }
  add_of_block(space.own, squares);
  add_of_block(space.mass, mass);
  __syncthreads();
  if (threadIdx.x == 0) {
    totals[cluster.rank] = space.own;
    totals[kMaxCluster + cluster.rank] = space.mass;
    left.budget = budget;
  }
  __syncthreads();
}

/** Adds up the totals of all blocks. A warp. */
__device__ __forceinline__ void add_totals(const uint64_t* totals, const Cluster& cluster,
                                           ErrorLeft& left) {
  const auto* from = reinterpret_cast<const unsigned long long*>(totals) + lane_id();
  const bool has = lane_id() < cluster.size;
  uint64_t squares = has ? __ldcg(from) : 0, mass = has ? __ldcg(from + kMaxCluster) : 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(~0u, squares, step);
    mass += __shfl_xor_sync(~0u, mass, step);
  }
  left.squares = squares;
  left.mass = left.budget.resident + mass;
}

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
