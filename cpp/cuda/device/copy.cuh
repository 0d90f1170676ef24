/**
 * Copies from global to shared memory that go on by themselves, and the barriers that tell when
 * they are there. From sm_90 on a single lane starts a copy of any size; before, all lanes of a
 * warp copy 16 bytes each.
 */
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PKV_HOPPER 1
#else
#define PKV_HOPPER 0
#endif

namespace pariskv::cuda::device {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   shared_address(barrier))
               : "memory");
}

/** Arrives, and has the phase last until so many bytes have come too. */
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
#if PKV_HOPPER
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

/** Waits for the end of the phase with this parity: 0 the first, 1 the second, 0 the third. */
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  const uint32_t address = shared_address(barrier);
  uint32_t done = 0;
  while (done == 0) {
#if PKV_HOPPER
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#endif
  }
}

/** What lies there sets out for the cache. */
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/**
 * Before the copy engine writes where ordinary stores have written, or meets a barrier just made:
 * by the threads that stored, ahead of what orders them and the copying thread.
 */
__device__ __forceinline__ void before_copies() {
#if PKV_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

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
  /** For all lanes: true in one. So the compiler knows that it is one. */
  static __device__ __forceinline__ bool takes_part() {
    uint32_t elected = 0;
#if PKV_HOPPER
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected));
#endif
    return elected != 0;
  }

  /** Calls `piece(i)` for i in [0, count), each in one lane. */
  template <typename Piece>
  static __device__ __forceinline__ void each(int count, Piece piece) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) piece(i);
  }
  static __device__ __forceinline__ void expect(uint64_t* barrier, uint32_t bytes) {
#if PKV_HOPPER
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
#endif
  }
  /** By the lane that takes part, instead of `expect` and `finish`: nothing else is to come. */
  static __device__ __forceinline__ void expect_all(uint64_t* barrier, uint32_t bytes) {
    arrive_and_expect(barrier, bytes);
  }
  static __device__ __forceinline__ void start(void* to, const void* from, uint32_t bytes,
                                               uint64_t* barrier) {
#if PKV_HOPPER
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
#endif
  }
  /** What is read once: it leaves the cache to others. */
  static __device__ __forceinline__ void stream(void* to, const void* from, uint32_t bytes,
                                                uint64_t* barrier) {
#if PKV_HOPPER
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
#endif
  }
  static __device__ __forceinline__ void finish(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
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
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + at),
                   "l"(static_cast<const char*>(from) + at)
                   : "memory");
    }
  }
  static __device__ __forceinline__ void stream(void* to, const void* from, uint32_t bytes,
                                                uint64_t* barrier) {
    start(to, from, bytes, barrier);
  }
  static __device__ __forceinline__ void finish(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
    // What the lanes stored themselves counts too.
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
  }
};

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
#if PKV_HOPPER
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
  }
  /** Until shared memory has been read, by what this thread started. */
  static __device__ __forceinline__ void wait_read() {
#if PKV_HOPPER
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
  }
  /** Until all is written. */
  static __device__ __forceinline__ void wait_written() {
#if PKV_HOPPER
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
  }
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

#if PKV_HOPPER
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

}  // namespace pariskv::cuda::device
