/** Sums of exponentials. */
#pragma once

#include "device/numbers.cuh"
#include "device/softmax.cuh"

namespace pariskv::cuda::device {

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
