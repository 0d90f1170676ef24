/** The small functions that the scale of a score is made of, as in
 * policy/pariskv/codec/head_scale.h. */
#pragma once

#include "device/numbers.cuh"
#include "policy/pariskv/codec/head_scale.h"

namespace pariskv::cuda::device {

/** log2 of a positive number, in a line from power to power. */
__device__ __forceinline__ float rough_log2(float x) {
  const uint32_t bits = bits_of(x);
  const float significand = float_of((bits & 0x7fffffu) | 0x3f800000u);
  return __fadd_rn(float(int(bits >> 23) - 127), __fsub_rn(significand, 1.0f));
}
/** Its inverse, for x <= 0. */
__device__ __forceinline__ float rough_exp2(float x) {
  if (!(x >= kInvisible)) return 0;
  const float whole = floorf(x);
  return __fadd_rn(1.0f, __fsub_rn(x, whole)) * float_of(uint32_t(127 + int(whole)) << 23);
}

/** Stands for a row that is none, or does not count. */
constexpr int kNoSteps = -(1 << 28);

__device__ __forceinline__ int steps_of(float x) {
  return int(rintf(fminf(fmaxf(x, -kMostSteps), kMostSteps)));
}

}  // namespace pariskv::cuda::device
