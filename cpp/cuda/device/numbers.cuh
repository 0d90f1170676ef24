/**
 * Numbers as the device sees them: elements of a model's dtype, the packed numbers of a key's
 * summary, and where they lie in a block. The rounding is the CPU's (cpu/numerics.h,
 * codec/summary_layout.h): both sides must agree bit for bit.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace pariskv::cuda::device {

/** Reads as CPU code does; sign, exponent and mantissa of a float. */
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < infinity(); }

/** Not fmaxf: a NaN in b survives, as in every maximum of the CPU. */
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

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

// The norm of a key, 8 bits: see codec/summary_layout.h. Code 0 marks a key never selected.

constexpr uint32_t kNormCodeShift = 19;
constexpr int32_t kNormCodeBase = (127 - 5) << 4;

__device__ __forceinline__ uint8_t norm_code(uint32_t norm_bits) {
  const int32_t code =
      int32_t((norm_bits + (1u << (kNormCodeShift - 1))) >> kNormCodeShift) - kNormCodeBase;
  return uint8_t(code < 1 ? 1 : code > 255 ? 255 : code);
}

/** A whole number under 2^20. */
__device__ __forceinline__ int32_t norm_units(uint32_t code) {
  return code == 0 ? 0 : int32_t(16 + (code & 15)) << (code >> 4);
}

// The scale of a key's weights, 16 bits.

constexpr uint32_t kScaleCodeShift = 15;

__device__ __forceinline__ uint16_t scale_code(uint32_t bits) {
  const uint32_t code = (bits + (1u << kScaleCodeShift) - 1) >> kScaleCodeShift;
  return uint16_t(code > 0xfeff ? 0xfeff : code);
}

__device__ __forceinline__ float scale_of(uint32_t code) {
  return float_of(code << kScaleCodeShift);
}

/** Where a summary block keeps what: byte offsets from its start, as SummaryLayout has them. */
struct BlockLayout {
  int64_t kv_heads;
  int64_t tokens;
  int64_t subspaces;

  __device__ __forceinline__ int64_t record_bytes() const { return 4 * subspaces; }
  __device__ __forceinline__ int64_t signs(int64_t head, int64_t slot) const {
    return (head * tokens + slot) * subspaces;
  }
  __device__ __forceinline__ int64_t norms(int64_t head, int64_t slot) const {
    return kv_heads * tokens * subspaces + head * tokens + slot;
  }
  __device__ __forceinline__ int64_t scales(int64_t head, int64_t slot) const {
    return kv_heads * tokens * (subspaces + 1) + 2 * (head * tokens + slot);
  }
  __device__ __forceinline__ int64_t records(int64_t head, int64_t slot) const {
    return kv_heads * tokens * (subspaces + 3) + (head * tokens + slot) * record_bytes();
  }
};

/** Divides x by y where x y < 2^kShift: the inverse is too large by less than 1 / 2^kShift, which
 * no quotient sees. */
template <int kShift>
struct Divisor {
  uint64_t inverse;

  static __host__ __device__ __forceinline__ Divisor of(int64_t y) {
    return {((uint64_t{1} << kShift) + uint64_t(y) - 1) / uint64_t(y)};
  }
  __device__ __forceinline__ uint32_t operator()(int x) const {
    return uint32_t(uint32_t(x) * inverse >> kShift);
  }
};
/** Of positions, which are under 2^23, by the tokens of a segment, 64 or more. */
using SegmentDivisor = Divisor<46>;
/** Of the indices of blocks and heads, by numbers of blocks and heads. */
using IndexDivisor = Divisor<40>;

}  // namespace pariskv::cuda::device
