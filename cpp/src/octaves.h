/**
 * Logits as whole numbers: steps of 1/64 octave, from products of numbers of 8 bits. A backend that
 * decides otherwise in the last bit picks other rows, so every operation here rounds once, in this
 * order.
 */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace pariskv {

constexpr float kOctaveSteps = 92.3324826f;  // 64 log2(e): steps per logit
constexpr float kMostSteps = 0x1p22f;
constexpr float kByteLevels = 127;
constexpr uint32_t kLeastExponent = 16;  // of a float, biased: smaller keys round to nothing

/** The nearest whole number, halves to even, for sizes up to 2^22; nearbyint would be a call. */
inline float nearest(float x) {
  constexpr float kWhole = 0x1.8p23f;  // floats of its size are whole
  return (x + kWhole) - kWhole;
}

/** The step of a logit, given in steps. */
inline int32_t whole_steps(float steps) {
  return int32_t(nearest(std::min(std::max(steps, -kMostSteps), kMostSteps)));
}

/** The largest magnitude. */
inline float largest_of(const float* x, int64_t count) {
  float largest = 0;
  for (int64_t d = 0; d < count; ++d) largest = std::max(largest, std::fabs(x[d]));
  return largest;
}

/** To whole numbers from -levels to levels, the largest of which `largest` becomes. */
template <typename Integer>
void quantise(const float* x, int64_t count, float largest, float levels, Integer* quantised) {
  const float steps = largest > 0 ? levels / largest : 0.0f;
  // A largest element so small that the division overflows cannot rank anything either.
  const float step = std::fabs(steps) < INFINITY ? steps : 0.0f;
  for (int64_t d = 0; d < count; ++d) quantised[d] = Integer(nearest(x[d] * step));
}

/** Steps of a logit per unit of a product of a query of 8 bits, whose largest element this is. */
inline float steps_per_unit(float scale, float largest) {
  return scale * (largest / kByteLevels) * kOctaveSteps;
}

/** The most steps of a logit; a cap of 0 is none. */
inline int32_t most_steps(float softcap) {
  return whole_steps(softcap > 0 ? softcap * kOctaveSteps : kMostSteps);
}

/** One step of a key whose largest element has this exponent, biased; see kLeastExponent. */
inline float key_step(uint32_t exponent) {
  const uint32_t bits = (exponent - 6) << 23;
  float step;
  std::memcpy(&step, &bits, sizeof step);
  return step;
}

/** steps_per_unit of a query times key_step of a key, for logit_steps: too large ranks nothing. */
inline float finite_unit(float unit) { return std::fabs(unit) < INFINITY ? unit : 0.0f; }

/** A logit in steps, from a finite unit. */
inline int32_t logit_steps(int32_t dot, float unit, int32_t most) {
  // Rounding keeps order, so a whole cap may come before it.
  const float cap = float(most);
  return int32_t(nearest(std::min(std::max(float(dot) * unit, -cap), cap)));
}

}  // namespace pariskv
