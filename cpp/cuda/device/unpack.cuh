/** Elements that lie 16 bytes at a time, as floats. */
#pragma once

#include "device/numbers.cuh"

namespace pariskv::cuda::device {

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

}  // namespace pariskv::cuda::device
