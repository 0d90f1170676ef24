/** Copies from shared to global memory that go on by themselves. */
#pragma once

#include "device/copy.cuh"

namespace pariskv::cuda::device {

/**
 * The other way, from shared to global memory: `each` hands out the lanes of a warp that have
 * something to store. A kernel waits for all of it before it ends.
 */
template <bool kBulk>
struct WarpStores;

template <>
struct WarpStores<true> {
  /** Calls `piece(lane)` for every lane that `has` one, each in its own lane. */
  template <typename Piece>
  static __device__ __forceinline__ void each(bool has, Piece piece) {
    if (has) piece(int(threadIdx.x % 32));
  }
  /** What `lane` has, where its piece is called. */
  static __device__ __forceinline__ int of_lane(int value, int) { return value; }
  static __device__ __forceinline__ void start(void* to, const void* from, uint32_t bytes) {
    ptx::cp_async_bulk_store(to, from, bytes);
    ptx::cp_async_bulk_commit_group();
  }
  /** Until shared memory has been read by all stores that this thread started. */
  static __device__ __forceinline__ void wait_read() { ptx::cp_async_bulk_wait_all_read(); }
  /** Until all stores that this thread started are written. */
  static __device__ __forceinline__ void wait_written() { ptx::cp_async_bulk_wait_all(); }
};

template <>
struct WarpStores<false> {
  /** Calls `piece(lane)` for every lane that `has` one, each in all lanes together. */
  template <typename Piece>
  static __device__ __forceinline__ void each(bool has, Piece piece) {
#pragma unroll 1
    for (uint32_t left = __ballot_sync(~0u, has); left != 0; left &= left - 1) {
      piece(__ffs(int(left)) - 1);
    }
  }
  static __device__ __forceinline__ int of_lane(int value, int lane) {
    return __shfl_sync(~0u, value, lane);
  }
  static __device__ __forceinline__ void start(void* to, const void* from, uint32_t bytes) {
#pragma unroll 1
    for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16) {
      *reinterpret_cast<uint4*>(static_cast<char*>(to) + at) =
          *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + at);
    }
  }
  static __device__ __forceinline__ void wait_read() {}
  static __device__ __forceinline__ void wait_written() {}
};

/** Rows go to the row cache by the copy engine where there is one. */
using RowStores = WarpStores<kBulkCopies>;

}  // namespace pariskv::cuda::device
