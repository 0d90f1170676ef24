/**
 * How the rows that a head attends to are cut, for sums that the next kernel puts together: from
 * their number alone, so that a result does not depend on the batch.
 */
#pragma once

namespace pariskv::cuda {

/** Rows that a block looks at in one step: a part has as many, or a few times as many. */
constexpr int kStepRows = 64;
/** Parts of a head at most. More of them would be more for the next kernel to read. */
constexpr int kMostParts = 32;

struct HeadParts {
  int rows;
  int each;  // rows of a part; the last one has what is left
  int count;

  __device__ __forceinline__ static HeadParts of(int rows) {
    const int steps = max((rows + kStepRows * kMostParts - 1) / (kStepRows * kMostParts), 1);
    const int each = kStepRows * steps;
    return {rows, each, (rows + each - 1) / each};
  }
  __device__ __forceinline__ int begin(int part) const { return min(part * each, rows); }
};

}  // namespace pariskv::cuda
