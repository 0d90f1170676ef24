/**
 * Numbers as the device sees them: floats and their bits, elements of a model's dtype. The rounding
 * is the CPU's (cpu/numerics.h): both sides must agree bit for bit.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace pariskv::cuda::device {

/** Reads as CPU code does; sign, exponent and mantissa of a float. */
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < infinity(); }

/** NaN for a number that is not finite: of infinite values the order of a sum decides, so outputs
 * have no infinity. */
__device__ __forceinline__ float finite_or_nan(float x) { return __fmaf_rn(x, 0.0f, x); }

/** Not fmaxf: a NaN in b survives, as in every maximum of the CPU. */
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// Elements: float, __half or __nv_bfloat16.

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return float_of(uint32_t(__bfloat16_as_ushort(x)) << 16);
}

template <typename Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/** Elements in 16 bytes. */
template <typename Element>
constexpr int kElementsPer16 = 16 / int(sizeof(Element));

}  // namespace pariskv::cuda::device
