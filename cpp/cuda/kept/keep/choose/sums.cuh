/** Sums over the threads of a block that chooses rows. */
#pragma once

#include "device/warp.cuh"

namespace pariskv::cuda {

constexpr int kChooseThreads = 1024;
constexpr int kChooseWarps = kChooseThreads / 32;

/** The sum over all lower lanes. */
__device__ __forceinline__ int64_t lanes_before(int64_t x) {
  int64_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, step);
    if (device::lane_id() >= step) sum += other;
  }
  return sum - x;
}

struct SumSpace {
  int64_t sums[2][kChooseWarps];  // by turns, so that one barrier is enough
  int counts[2][kChooseWarps];
};

/** Sums over all threads. Each has one barrier. */
struct BlockSums {
  SumSpace& space;
  int turn = 0;

  __device__ __forceinline__ int64_t of(int64_t x) {
    turn ^= 1;
    const int64_t sum = device::warp_sum(x);
    if (device::lane_id() == 0) space.sums[turn][device::warp_id()] = sum;
    __syncthreads();
    return device::warp_sum(space.sums[turn][device::lane_id()]);
  }
  __device__ __forceinline__ int of(int x) {
    turn ^= 1;
    const int sum = __reduce_add_sync(~0u, x);
    if (device::lane_id() == 0) space.counts[turn][device::warp_id()] = sum;
    __syncthreads();
    return __reduce_add_sync(~0u, space.counts[turn][device::lane_id()]);
  }
  /** The sum over all lower threads. */
  __device__ __forceinline__ int64_t before(int64_t x) {
    turn ^= 1;
    const int64_t lower = lanes_before(x);
    if (device::lane_id() == 31) space.sums[turn][device::warp_id()] = lower + x;
    __syncthreads();
    const int64_t lower_warps = lanes_before(space.sums[turn][device::lane_id()]);
    return __shfl_sync(~0u, lower_warps, device::warp_id()) + lower;
  }
  /** The same; `all` becomes that of all. */
  __device__ __forceinline__ int before(int x, int& all) {
    turn ^= 1;
    const int lower = device::lanes_before(x);
    if (device::lane_id() == 31) space.counts[turn][device::warp_id()] = lower + x;
    __syncthreads();
    const int of_warp = space.counts[turn][device::lane_id()];
    const int lower_warps = device::lanes_before(of_warp);
    all = __shfl_sync(~0u, lower_warps + of_warp, 31);
    return __shfl_sync(~0u, lower_warps, device::warp_id()) + lower;
  }
};
static_assert(kChooseWarps == 32, "a lane for each warp");

}  // namespace pariskv::cuda
