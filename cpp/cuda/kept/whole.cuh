/** Logits as whole numbers: octaves.h and observe.h for the device, with the same roundings. */
#pragma once

#include "device/numbers.cuh"
#include "observe.h"
#include "octaves.h"

namespace pariskv::cuda::device {

/** The nearest whole number, halves to even. */
__device__ __forceinline__ int nearest_whole(float x) { return int(rintf(x)); }

__device__ __forceinline__ float clamped(float x, float most) {
  return fminf(fmaxf(x, -most), most);
}

/** Of a key whose largest magnitude has these bits; 255: it is not finite. */
__device__ __forceinline__ uint32_t exponent_of(uint32_t largest) {
  return max(largest >> 23, kLeastExponent);
}
/** One step of such a key. */
__device__ __forceinline__ float step_of(uint32_t exponent) {
  return float_of((exponent - 6) << 23);
}
/** The power of two that brings its largest element to 64 or more, and less than 128. */
__device__ __forceinline__ float steps_up(uint32_t exponent) {
  return float_of((254 + 6 - min(exponent, 254u)) << 23);
}
/** An element, rounded to 8 bits. */
__device__ __forceinline__ int rounded_element(float x, uint32_t exponent, float up) {
  if (exponent == 255) return 0;
  return min(max(nearest_whole(x * up), -int(kByteLevels)), int(kByteLevels));
}
/** Four of them in a word. */
__device__ __forceinline__ uint32_t rounded_word(const float (&x)[4], uint32_t exponent, float up) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word |= (uint32_t(rounded_element(x[i], exponent, up)) & 255u) << 8 * i;
  }
  return word;
}

/** Steps of a logit per unit of a product: too large ranks nothing. */
__device__ __forceinline__ float finite_steps(float unit) { return finite(unit) ? unit : 0.0f; }

/** A part of a logit, in steps. */
__device__ __forceinline__ int part_steps(int dot, float unit) {
  return nearest_whole(clamped(float(dot) * unit, kMostSteps));
}

/** The weights of logits 0 to 63 steps below the largest one. */
struct WeightTable {
  uint32_t of[64];
};
constexpr WeightTable make_weight_table() {
  WeightTable table{};
  for (size_t i = 0; i < 64; ++i) table.of[i] = weight_table()[i];
  return table;
}

/** As weight_of of observe.h. */
__device__ __forceinline__ uint32_t weight_below(const WeightTable& table, int below) {
  return below >= 64 * (kWeightBits + 1) ? 0 : table.of[below & 63] >> (below >> 6);
}

__device__ __forceinline__ uint64_t share_with(uint32_t weight, uint64_t reciprocal) {
  return weight * reciprocal >> (63 - kShareBits);
}

}  // namespace pariskv::cuda::device
