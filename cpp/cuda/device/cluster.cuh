/**
 * The blocks that share one kv head of one sequence. From sm_90 on they are a thread-block cluster
 * and write into one another's shared memory; before, there is only one.
 */
#pragma once

#include "device/copy.cuh"

namespace pariskv::cuda::device {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 16;

/**
 * Sums of floats are cut into this many parts, added in the order of the parts, so that the
 * result is the same whatever the number of blocks: each block has the same number of parts, side
 * by side.
 */
constexpr int kParts = 16;
static_assert(kMaxCluster == kParts);

/** Candidates are estimated in as many slices. */
constexpr int kSlices = 32;

__device__ __forceinline__ int slice_begin(int count, int slice) {
  return int(uint32_t(count) * uint32_t(slice) / kSlices);
}

/** Where part `part` of `count` things begins; there are at most 2^23 of them. */
__device__ __forceinline__ int part_begin(int count, int part) {
  return int(uint32_t(count) * uint32_t(part) / kParts);
}

/** Where the share of warp `warp` of `count` things begins. */
__device__ __forceinline__ int warp_begin(int count, int warp) {
  return int(uint32_t(count) * uint32_t(warp) / kWarps);
}

/** A kernel that was launched early waits here for the work of the one before it. */
__device__ __forceinline__ void wait_for_predecessor() { ptx::griddepcontrol_wait(); }
/** Lets the next kernel take its place on the device; it waits for our work by itself. */
__device__ __forceinline__ void let_successor_start() { ptx::griddepcontrol_launch_dependents(); }

__device__ __forceinline__ int lane_id() { return int(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return int(threadIdx.x / 32); }

/** Of a power of two, as the sizes of clusters are, which spares divisions. */
__device__ __forceinline__ int log2_of_power(int power) { return 31 - __clz(power); }

struct Cluster {
  int size;
  int rank;

  __device__ __forceinline__ int log_size() const { return log2_of_power(size); }
  __device__ __forceinline__ int log_parts() const { return 4 - log_size(); }
  __device__ __forceinline__ int first_part() const { return rank << log_parts(); }
  __device__ __forceinline__ int end_part() const { return (rank + 1) << log_parts(); }

  /**
   * Between `arrive` and the return of `wait` every thread of every block has arrived; what they
   * wrote before that, to shared or global memory, can then be read by all.
   */
  __device__ __forceinline__ void arrive() const {
    if (size > 1) ptx::barrier_cluster_arrive_release();
  }
  __device__ __forceinline__ void wait() const {
    if (kHopper && size > 1) return ptx::barrier_cluster_wait_acquire();
    __syncthreads();
  }
  __device__ __forceinline__ void sync() const {
    arrive();
    wait();
  }
};

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

__device__ __forceinline__ int64_t warp_sum(int64_t x) {
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
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
