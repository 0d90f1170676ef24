/** Counts and sums that one kernel leaves and a later one reads. */
#pragma once

#include <cstdint>

#include "device/numbers.cuh"
#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "policy/pariskv/rules.h"

namespace pariskv::cuda::device {

constexpr int kFine = 16;  // bins of scores that are looked at together

/** The result of a block that scores: how many scores are at least b, for every b. */
struct ScoreCounts {
  int32_t at_least[256];
  int32_t coarse[kFine];          // every 16th of these
  int32_t of_warps[kWarps][256];  // the same of each warp, whose keys lie side by side
};

/** Sums over the blocks of a chunk, of which there are at most 64: as BlockSums. */
struct alignas(16) ChunkSums {
  int32_t sum, most, weight, unused;
  int64_t squares, unused_too;
};

/** What the error of a query head is made of (policy/pariskv/budget.h). */
struct ErrorParts {
  uint64_t squares;  // of exponentials of rows of the tail, less `top`, in units
  float top;         // their largest logit
  float log_sum;     // of the output
  float noise;       // spread of an estimated logit, for each unit of a key's scale
  float unused;
  float samples[kSampledKeys];  // logits of keys that are no candidates
};

/** A running sum of exponentials: of sum * e^maximum. */
struct Mass {
  float maximum, sum;

  /** NaN is left out of the maximum and stays in the sum. */
  __device__ __forceinline__ void add(float x) {
    if (x > maximum) {
      sum = __fmul_rn(sum, exp_of(maximum - x));
      maximum = x;
    }
    sum = __fadd_rn(sum, exp_of(x - (maximum == -infinity() ? 0.0f : maximum)));
  }
};

}  // namespace pariskv::cuda::device
