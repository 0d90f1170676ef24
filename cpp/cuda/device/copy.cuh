/**
 * Copies from global to shared memory that go on by themselves, and the barriers that tell when
 * they are there. From sm_90 on a single lane starts a copy of any size; before, all lanes of a
 * warp copy 16 bytes each.
 */
#pragma once

#include "device/barrier.cuh"
#include "device/ptx.cuh"

namespace pariskv::cuda::device {

constexpr bool kBulkCopies = kHopper;

/**
 * How a warp copies: lanes that `takes_part` say what to `expect` and `start` it, or `each` hands
 * pieces out to them; then all lanes `finish`, and the barrier completes when everything is there.
 * It was made for kArrivals of every warp. Sizes and addresses are multiples of 16.
 */
template <bool kBulk>
struct WarpCopies;

template <>
struct WarpCopies<true> {
  static constexpr uint32_t kArrivals = 1;
  /** For all lanes: true in one. */
  static __device__ __forceinline__ bool takes_part() { return ptx::elect_sync(); }

  /** Calls `piece(i)` for i in [0, count), each in one lane. */
  template <typename Piece>
  static __device__ __forceinline__ void each(int count, Piece piece) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) piece(i);
  }
  static __device__ __forceinline__ void expect(uint64_t* barrier, uint32_t bytes) {
    ptx::mbarrier_expect_tx(barrier, bytes);
  }
  /** By the lane that takes part, instead of `expect` and `finish`: nothing else is to come. */
  static __device__ __forceinline__ void expect_all(uint64_t* barrier, uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
  }
  static __device__ __forceinline__ void start(void* to, const void* from, uint32_t bytes,
                                               uint64_t* barrier) {
    ptx::cp_async_bulk_load(to, from, bytes, barrier);
  }
  /** For bytes that are read once: other data stays in the L2 cache. */
  static __device__ __forceinline__ void stream(void* to, const void* from, uint32_t bytes,
                                                uint64_t* barrier) {
    ptx::cp_async_bulk_load_evict_first(to, from, bytes, barrier);
  }
  static __device__ __forceinline__ void finish(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
};

template <>
struct WarpCopies<false> {
  static constexpr uint32_t kArrivals = 33;
  static __device__ __forceinline__ bool takes_part() { return true; }

  /** Calls `piece(i)` for i in [0, count), each in all lanes together. */
  template <typename Piece>
  static __device__ __forceinline__ void each(int count, Piece piece) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) piece(i);
  }
  static __device__ __forceinline__ void expect(uint64_t*, uint32_t) {}
  static __device__ __forceinline__ void expect_all(uint64_t*, uint32_t) {}
  static __device__ __forceinline__ void start(void* to, const void* from, uint32_t bytes,
                                               uint64_t*) {
    const uint32_t target = shared_address(to);
#pragma unroll 1
    for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16) {
      ptx::cp_async_cg_16(target + at, static_cast<const char*>(from) + at);
    }
  }
  static __device__ __forceinline__ void stream(void* to, const void* from, uint32_t bytes,
                                                uint64_t* barrier) {
    start(to, from, bytes, barrier);
  }
  static __device__ __forceinline__ void finish(uint64_t* barrier) {
    ptx::cp_async_mbarrier_arrive_noinc(barrier);
    // What the lanes stored themselves counts too.
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
};

/** Rows come by the copy engine where there is one. */
using RowCopies = WarpCopies<kBulkCopies>;

}  // namespace pariskv::cuda::device
