/**
 * Matrix products of a warpgroup, four warps together, whose second factor is read from shared
 * memory (wgmma). Of compute capability 9.0 alone: the code is compiled for 9.0a. The emulator
 * replaces this header, as it does ptx.cuh.
 *
 * Sums lie as those of mma.m16n8k16 do, 16 rows for each warp. They must not be touched between a
 * product and the wait for it.
 */
#pragma once

#include "device/ptx.cuh"

namespace pariskv::cuda::device::ptx {

/** What was written to registers and to shared memory before is seen by products after it. */
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/** Waits for this warp's products, all but the last `kGroups` groups. */
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
/** Keeps the compiler from moving these registers' other uses past this place. */
template <int kBlocks>
__device__ __forceinline__ void pin(float (&sums)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kBlocks; ++i) asm volatile("" : "+f"(sums[i / 4][i % 4])::"memory");
}

/** Registers of a warpgroup's threads: gives some back, and takes some, when there are. */
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/** Whether all of `threads` threads, whole warps, have come to barrier `id`, and if one says so. */
__device__ __forceinline__ bool barrier_red_or(int id, int threads, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n barrier.cta.red.or.pred q, %1, %2, p;\n"
      " selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(uint32_t(predicate))
      : "memory");
  return any != 0;
}

/** mbarrier_try_wait_parity at once: never sleeps. */
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

/** Comes to barrier `id`, and waits until `threads` threads, whole warps, have come. */
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/** The same without waiting. */
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#define PKV_FOUR(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define PKV_THIRTY_TWO(i)                                                          \
  PKV_FOUR(i), PKV_FOUR(i + 1), PKV_FOUR(i + 2), PKV_FOUR(i + 3), PKV_FOUR(i + 4), \
      PKV_FOUR(i + 5), PKV_FOUR(i + 6), PKV_FOUR(i + 7)
#define PKV_REGISTERS_OF_64                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define PKV_REGISTERS_OF_128                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

// sums (+)= a b, 64 rows for the warpgroup, 16 a warp, times 64 or 128 columns, 16 numbers each: a
// in registers, as a fragment of mma.m16n8k16; of b the 16 numbers lie side by side.
__device__ __forceinline__ void wgmma_m64n64k16_bf16(float (&sums)[8][4], const uint32_t (&a)[4],
                                                     uint64_t b, bool adds) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %37, 0;\n "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PKV_REGISTERS_OF_64
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : PKV_THIRTY_TWO(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(uint32_t(adds))
      : "memory");
}
__device__ __forceinline__ void wgmma_m64n64k16_f16(float (&sums)[8][4], const uint32_t (&a)[4],
                                                    uint64_t b, bool adds) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %37, 0;\n "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " PKV_REGISTERS_OF_64
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : PKV_THIRTY_TWO(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(uint32_t(adds))
      : "memory");
}

// sums += a b; of b the columns of a row lie side by side.
__device__ __forceinline__ void wgmma_m64n64k16_bf16_trans(float (&sums)[8][4],
                                                           const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PKV_REGISTERS_OF_64
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : PKV_THIRTY_TWO(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}
__device__ __forceinline__ void wgmma_m64n64k16_f16_trans(float (&sums)[8][4],
                                                          const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " PKV_REGISTERS_OF_64
               "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : PKV_THIRTY_TWO(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}
__device__ __forceinline__ void wgmma_m64n128k16_bf16_trans(float (&sums)[16][4],
                                                            const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " PKV_REGISTERS_OF_128
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : PKV_THIRTY_TWO(0), PKV_THIRTY_TWO(8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}
__device__ __forceinline__ void wgmma_m64n128k16_f16_trans(float (&sums)[16][4],
                                                           const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " PKV_REGISTERS_OF_128
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : PKV_THIRTY_TWO(0), PKV_THIRTY_TWO(8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
               : "memory");
}

#undef PKV_REGISTERS_OF_128
#undef PKV_REGISTERS_OF_64
#undef PKV_THIRTY_TWO
#undef PKV_FOUR

}  // namespace pariskv::cuda::device::ptx
