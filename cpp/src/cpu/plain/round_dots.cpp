// Products of 8-bit keys and queries: enough to tell how much attention some rows get.
#include <algorithm>
#include <cmath>

#include "cpu/numerics.h"
#include "cpu/plain/plain.h"
#include "octaves.h"

namespace pariskv::cpu::plain {

void round_dots(const RoundDotsRun& run) {
  float key[kMaxHeadDim];
  int32_t rounded[kMaxHeadDim];
  for (int64_t r = 0; r < run.count; ++r) {
    to_float(run.keys[r], run.type, run.head_dim, key);
    uint32_t largest = 0;
    for (int64_t d = 0; d < run.head_dim; ++d) {
      largest = std::max(largest, bits_of(key[d]) & 0x7fffffffu);
    }
    const uint32_t exponent = std::max(largest >> 23, kLeastExponent);
    run.exponents[r] = uint8_t(exponent);
    // The power of two that brings the largest element to 64 or more, and less than 128.
    const float up = float_of((254 + 6 - std::min(exponent, 254u)) << 23);
    for (int64_t d = 0; d < run.head_dim; ++d) {
      const float whole = exponent == 255 ? 0.0f : std::nearbyint(key[d] * up);
      rounded[d] = std::clamp(int32_t(whole), -127, 127);
    }
    for (int64_t q = 0; q < run.queries; ++q) {
      int32_t dot = 0;
      for (int64_t d = 0; d < run.head_dim; ++d) {
        dot += rounded[d] * run.query[q * run.head_dim + d];
      }
      run.dots[q * run.count + r] = dot;
    }
  }
}

}  // namespace pariskv::cpu::plain
