/** Lanes of a warp: who they are, what they exchange. */
#pragma once

#include <cstdint>

namespace pariskv::cuda::device {

__device__ __forceinline__ int lane_id() { return int(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return int(threadIdx.x / 32); }

/** Of a power of two, as the sizes of clusters are, which spares divisions. */
__device__ __forceinline__ int log2_of_power(int power) { return 31 - __clz(power); }

/** The lane and the warp from a register: else they are asked for anew wherever they are used. */
__device__ __forceinline__ int held_lane() { return __shfl_sync(~0u, lane_id(), lane_id()); }
__device__ __forceinline__ int held_warp() { return __shfl_sync(~0u, warp_id(), 0); }

/** From a value that all lanes have: the compiler knows it of the result. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
template <typename T>
__device__ __forceinline__ T* uniform(T* pointer) {
  const auto bits = reinterpret_cast<uint64_t>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(~0u, bits, 0));
}

// Reductions over a warp, by exchange: the order of the additions is fixed.

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) x = x + __shfl_xor_sync(~0u, x, step);
  return x;
}

/** NaN is left out: sums keep it. */
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

/** By three sums of words, which cost less than ten exchanges. */
__device__ __forceinline__ int64_t warp_sum(int64_t x) {
  constexpr uint32_t kLow = (1u << 24) - 1;
  const uint32_t low = __reduce_add_sync(~0u, uint32_t(x) & kLow);
  const uint32_t middle = __reduce_add_sync(~0u, uint32_t(x >> 24) & kLow);
  const int high = __reduce_add_sync(~0u, int(x >> 48));
  return (int64_t{high} << 48) + (int64_t{middle} << 24) + int64_t{low};
}

/** The sum over all lower lanes. */
__device__ __forceinline__ int lanes_before(int x) {
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane_id() >= step) sum += other;
  }
  return sum - x;
}

/** A float as a number that sorts as the floats do. */
__device__ __forceinline__ uint32_t sortable(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace pariskv::cuda::device
