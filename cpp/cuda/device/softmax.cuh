/** The functions of a softmax, and the soft cap of a logit. */
#pragma once

#include "device/numbers.cuh"
#include "device/ptx.cuh"

namespace pariskv::cuda::device {

/** e^x to about 2^-21 for the exponents of a softmax; minus infinity gives 0, NaN stays NaN. */
__device__ __forceinline__ float exp_of(float x) {
  return ptx::ex2_approx_ftz(x * 1.44269504088896341f);
}

/** log of sum * e^maximum; minus infinity when nothing was seen. */
__device__ __forceinline__ float log_of_sum(float maximum, float sum) {
  return sum > 0 || sum != sum ? maximum + logf(sum) : -infinity();
}

/** log of e^a + e^b. */
__device__ __forceinline__ float log_add(float a, float b) {
  const float top = larger(a, b);
  if (top == -infinity()) return top;
  return top + logf(expf(a - top) + expf(b - top));
}

/** Out of the way: most models cap nothing, and code that is jumped over has to come as well. */
inline __device__ __noinline__ float cap_softly(float logit, float softcap) {
  return softcap * tanhf(logit / softcap);
}
__device__ __forceinline__ float soft_capped(float logit, float softcap) {
  return softcap > 0 ? cap_softly(logit, softcap) : logit;
}

}  // namespace pariskv::cuda::device
