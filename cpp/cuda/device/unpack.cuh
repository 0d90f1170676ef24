/** Elements that lie 16 bytes at a time, as floats. */
#pragma once

#include "device/numbers.cuh"

namespace pariskv::cuda::device {

/** Neighbouring elements, read at once. */
template <typename Element, int kCount>
struct alignas(kCount * sizeof(Element)) Neighbours {
  Element of[kCount];

  __device__ __forceinline__ void to(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = to_float(of[i]);
  }
};

/** The elements of 16 bytes, as floats. */
template <typename Element>
__device__ __forceinline__ void unpack(const uint4& packed, float (&out)[kElementsPer16<Element>]);
template <>
__device__ __forceinline__ void unpack<float>(const uint4& packed, float (&out)[4]) {
  out[0] = float_of(packed.x), out[1] = float_of(packed.y);
  out[2] = float_of(packed.z), out[3] = float_of(packed.w);
}
template <>
__device__ __forceinline__ void unpack<__half>(const uint4& packed, float (&out)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}
template <>
__device__ __forceinline__ void unpack<__nv_bfloat16>(const uint4& packed, float (&out)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = float_of(words[i] << 16);
    out[2 * i + 1] = float_of(words[i] & 0xffff0000u);
  }
}

/** `kWords` neighbouring elements of a row in shared memory, from a multiple of kWords on. */
template <int kWords>
__device__ __forceinline__ void load_words(const float* from, float (&x)[kWords]) {
  if constexpr (kWords == 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    x[0] = pair.x, x[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

__device__ __forceinline__ float2 to_floats(uint32_t packed, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

__device__ __forceinline__ float2 to_floats(uint32_t packed, __nv_bfloat16) {
  return {float_of(packed << 16), float_of(packed & 0xffff0000u)};
}

template <int kWords, typename Element>
__device__ __forceinline__ void load_words(const Element* from, float (&x)[kWords]) {
  uint32_t packed[kWords / 2];
  if constexpr (kWords == 2) packed[0] = *reinterpret_cast<const uint32_t*>(from);
  if constexpr (kWords == 4) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    packed[0] = two.x, packed[1] = two.y;
  }
  if constexpr (kWords >= 8) {
#pragma unroll
    for (int i = 0; i < kWords / 8; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      packed[4 * i] = four.x, packed[4 * i + 1] = four.y;
      packed[4 * i + 2] = four.z, packed[4 * i + 3] = four.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kWords / 2; ++i) {
    const float2 pair = to_floats(packed[i], Element{});
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

}  // namespace pariskv::cuda::device
