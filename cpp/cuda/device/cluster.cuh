/**
 * The blocks that share one kv head of one sequence. From sm_90 on they are a thread-block cluster
 * and write into one another's shared memory; before, there is only one.
 */
#pragma once

#include "device/partition.cuh"
#include "device/ptx.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

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

}  // namespace pariskv::cuda::device
