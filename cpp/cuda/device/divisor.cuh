/** Division by a number that is known when a kernel is launched. */
#pragma once

#include <cstdint>

namespace pariskv::cuda::device {

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
