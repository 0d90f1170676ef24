/**
 * The error of a head, when its rows are attended to: the rows of its tail that are not selected
 * have shares of the output, and the sum of their squares says what the sample has added
 * (policy/pariskv/budget.h). Logits of all of them are in scratch.
 *
 * | step | by | when |
 * | --- | --- | --- |
 * | `square_tail` | each block, of a part of the tail | while its selected rows come |
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
  __device__ __forceinline__ uint64_t square(int i, int head, float top) const {
    const float one = exp_of(__ldcg(logits + int64_t(i) * group + head) - top);
    return uint64_t(one * one * kTailUnits);
  }
};

/**
 * Adds the squares of this block's part of the tail, and takes those of its selected rows back,
 * whichever part they are in. A function of its own, as `cut_to_error`. All threads.
 * @param selected  (count) of this block
 */
inline __device__ __noinline__ void square_tail(const TailLogits tail, const Cluster cluster,
                                                const SelectedRow* selected, int count) {
  const int begin = tail.rows * cluster.rank / cluster.size;
  const int end = tail.rows * (cluster.rank + 1) / cluster.size;
#pragma unroll 1
  for (int head = 0; head < tail.group; ++head) {
    const float top = tail.largest(head);
    if (cluster.rank == 0 && threadIdx.x == 0) tail.errors[head].top = top;
    if (top == -infinity()) continue;
    uint64_t own = 0;
#pragma unroll 4
    for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
      own += tail.square(i, head, top);
    }
#pragma unroll 1
    for (int i = int(threadIdx.x); i < count; i += kThreads) {
      const int number = selected[i].where >> 8;
      if (number > 0) own -= tail.square(number - 1, head, top);
    }
    add_of_block(reinterpret_cast<unsigned long long&>(tail.errors[head].squares), own);
  }
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
