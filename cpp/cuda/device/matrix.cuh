/**
 * The matrix instructions, and numbers as they want them.
 */
#pragma once

#include <type_traits>

#include "device/numbers.cuh"
#include "device/ptx.cuh"

namespace pariskv::cuda::device {

// Fragments as the PTX manual has them: lane 4 g + t holds of A rows g and g + 8, columns 2 t,
// 2 t + 1, 2 t + 8, 2 t + 9; of B the same rows of column g; of C rows g and g + 8, columns 2 t
// and 2 t + 1.

/** sums += a b: 16 x 16 times 16 x 8. */
template <typename Element>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    ptx::mma_m16n8k16_f16(sums, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_bf16(sums, a, b0, b1);
  }
}

/** The same with 8 columns of a and rows of b: of A rows g and g + 8, columns 2 t and 2 t + 1. */
template <typename Element>
__device__ __forceinline__ void multiply(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if constexpr (std::is_same_v<Element, __half>) {
    ptx::mma_m16n8k8_f16(sums, a0, a1, b);
  } else {
    ptx::mma_m16n8k8_bf16(sums, a0, a1, b);
  }
}

template <typename Element>
__device__ __forceinline__ uint16_t element_bits(Element x) {
  return reinterpret_cast<const uint16_t&>(x);
}

/** Two numbers as elements: one instruction, of the pipe that is not the exponential's. */
template <typename Element>
__device__ __forceinline__ uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 two = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(two);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(two);
  }
}

/**
 * Two numbers as elements, and, into `rest`, what rounding took from them: never quite nothing,
 * which would make NaN of an infinite factor.
 */
template <typename Element>
__device__ __forceinline__ uint32_t pack(float x, float y, uint32_t& rest) {
  const uint32_t two = pack<Element>(x, y);
  float2 rounded;
  if constexpr (std::is_same_v<Element, __half>) {
    rounded = __half22float2(reinterpret_cast<const __half2&>(two));
  } else {
    rounded = {float_of(two << 16), float_of(two & 0xffff0000u)};
  }
  rest = pack<Element>(x - rounded.x, y - rounded.y) | 0x00010001u;
  return two;
}

}  // namespace pariskv::cuda::device
