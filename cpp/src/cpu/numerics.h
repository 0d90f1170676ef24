/**
 * Scalar arithmetic that every CPU level shares, written so that a vector lane and a
 * plain loop round alike. Nothing here depends on the instruction set: the SIMD files
 * must not include it (an inline function compiled with their flags could be the copy
 * that the linker keeps).
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "row_type.h"

namespace pariskv::cpu {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float bfloat16_to_float(uint16_t value) { return float_of(uint32_t{value} << 16); }

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/** What numbers in 8 bits are multiplied by, so that the largest has all levels; NaN if one of the
 * numbers is not finite. Of finite numbers it makes finite ones. */
inline float int8_scale(const float* numbers, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(numbers[i]);
    if (!(size < INFINITY)) return NAN;
    largest = size > largest ? size : largest;
  }
  const float scale = largest / float(kInt8Levels);
  // Of the largest floats it may have been rounded up.
  return scale * float(kInt8Levels) < INFINITY ? scale : std::nextafter(scale, 0.0f);
}

/** The nearest level, halves to even; 0 where there is no scale. */
inline int8_t float_to_int8(float x, float scale) {
  if (!(scale > 0)) return 0;
  const float level = std::nearbyint(x / scale);  // of the least numbers, scales are rough
  return int8_t(std::fmin(std::fmax(level, -float(kInt8Levels)), float(kInt8Levels)));
}

inline float float16_to_float(uint16_t value) {
  const uint32_t sign = uint32_t(value & 0x8000u) << 16;
  const uint32_t exponent = (value >> 10) & 31u;
  const uint32_t mantissa = value & 1023u;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) return float_of(sign | bits_of(float(mantissa) * 0x1p-24f));
  return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t float_to_float16(float x) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const float magnitude = float_of(bits & 0x7fffffffu);
  if (magnitude != magnitude) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) {  // subnormal in float16: let the adder round it
    return uint16_t(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
  }
  const uint32_t b = bits_of(magnitude);
  return uint16_t(sign | ((b - (112u << 23) + 0xfffu + ((b >> 13) & 1u)) >> 13));
}

/** `lanes` and `fold` of kernels.h. */
struct Lanes {
  float value[16] = {};
  float fold() const {
    float t[16];
    std::memcpy(t, value, sizeof t);
    for (int half = 8; half >= 1; half /= 2) {
      for (int i = 0; i < half; ++i) t[i] = t[i] + t[i + half];
    }
    return t[0];
  }
};

inline float dot(const float* a, const float* b, int64_t count) {
  Lanes lanes;
  for (int64_t d = 0; d < count; ++d) {
    lanes.value[d % 16] = std::fma(a[d], b[d], lanes.value[d % 16]);
  }
  return lanes.fold();
}

/** The fold of 8 terms. */
inline float octet(const float* t) {
  const float a = t[0] + t[4], b = t[1] + t[5], c = t[2] + t[6], d = t[3] + t[7];
  return (a + c) + (b + d);
}

/**
 * e^x, the same steps as the vector versions: x = n ln 2 + r, a degree-6 polynomial in r,
 * n added to the exponent. Under -87 the result stays at e^-87 (about 1e-38); over 88 at e^88;
 * NaN stays NaN. At most 2 units in the last place off.
 */
inline float exp(float x) {
  x = -87.0f > x ? -87.0f : x;
  x = 88.0f < x ? 88.0f : x;
  const float n = std::nearbyint(x * 1.44269504088896341f);
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  const float y = std::fma(p, r * r, r) + 1.0f;
  if (n != n) return n;
  return y * float_of(uint32_t(int32_t(n) + 127) << 23);
}

}  // namespace pariskv::cpu
