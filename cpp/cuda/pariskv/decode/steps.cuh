/** Logits as whole steps, as octaves.h has them. */
#pragma once

#include "device/numbers.cuh"
#include "octaves.h"

namespace pariskv::cuda::device {

/** Stands for a row that is none, or does not count. */
constexpr int kNoSteps = -(1 << 28);

__device__ __forceinline__ int steps_of(float x) {
  return int(rintf(fminf(fmaxf(x, -kMostSteps), kMostSteps)));
}

}  // namespace pariskv::cuda::device
