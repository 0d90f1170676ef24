/**
 * All inline PTX of the CUDA code: a function for each instruction, under its name in the PTX
 * manual. Instructions of compute capability 9.0 do nothing in code for older devices, and their
 * callers do without them there. The emulator (tests/cpp/emulated_cuda) replaces this header by its
 * own version: a new function is needed in both.
 *
 * Not <cuda/ptx>: in CUDA 12.8 it has a third of these (no elect.sync, no aligned barriers of a
 * cluster), and it adds 1.3 s to the compilation of every file. Not cuda::atomic_ref: it compiles
 * to generic loads and stores, where these are of global memory.
 */
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PKV_HOPPER 1
#else
#define PKV_HOPPER 0
#endif

namespace pariskv::cuda::device {

/** Whether the code being compiled is for compute capability 9.0 or newer. */
constexpr bool kHopper = PKV_HOPPER;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

namespace ptx {

// Barriers in shared memory (mbarrier).

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   shared_address(barrier))
               : "memory");
}

/** Arrives, and the phase lasts until that many bytes have come as well. From 9.0. */
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if PKV_HOPPER
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

/** The same without an arrival. From 9.0. */
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if PKV_HOPPER
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

/**
 * Whether the phase of this parity has ended: 0 the first, 1 the second, 0 the third. From 9.0 on
 * the thread may sleep for a while before it returns; below, this is mbarrier.test_wait.
 */
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
#if PKV_HOPPER
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

// Copies to shared memory that pass no register (cp.async), a thread's own.

/** Copies 16 bytes. Where `present` is false, nothing is read and zeros are written. */
__device__ __forceinline__ void cp_async_cg_16(uint32_t target, const void* source,
                                               bool present = true) {
  const int source_bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(source_bytes)
               : "memory");
}

/** The same of bytes whose neighbours are wanted too: 256 of them come as far as the L2 cache. */
__device__ __forceinline__ void cp_async_cg_16_in_lines(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(target), "l"(source)
               : "memory");
}

/** Copies 4 or 8 bytes. */
template <typename T>
__device__ __forceinline__ void cp_async_ca(T* to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(int(sizeof(T)))
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/** Waits for this thread's copies, all but the last `kGroups` groups. */
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/** Arrives at the barrier once this thread's copies are done. */
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Copies of any multiple of 16 bytes by one thread (cp.async.bulk). From 9.0.

/** From global to shared memory; the barrier counts the bytes. */
__device__ __forceinline__ void cp_async_bulk_load(void* to, const void* from, uint32_t bytes,
                                                   uint64_t* barrier) {
#if PKV_HOPPER
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

/** The same of bytes that are read once: in the L2 cache they are the first to be evicted. */
__device__ __forceinline__ void cp_async_bulk_load_evict_first(void* to, const void* from,
                                                               uint32_t bytes, uint64_t* barrier) {
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

/** From shared to global memory, in the thread's current group. */
__device__ __forceinline__ void cp_async_bulk_store(void* to, const void* from, uint32_t bytes) {
#if PKV_HOPPER
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
#if PKV_HOPPER
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/** Until shared memory has been read by all stores of this thread. */
__device__ __forceinline__ void cp_async_bulk_wait_all_read() {
#if PKV_HOPPER
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
/** Until all stores of this thread are written. */
__device__ __forceinline__ void cp_async_bulk_wait_all() {
#if PKV_HOPPER
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

/**
 * Orders this thread's ordinary accesses to shared memory before what the copy engine does there.
 * From 9.0.
 */
__device__ __forceinline__ void fence_proxy_async_shared() {
#if PKV_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Clusters of blocks. From 9.0; all threads of a warp together.

/** What was written before can be read by all threads of the cluster after their wait. */
__device__ __forceinline__ void barrier_cluster_arrive_release() {
#if PKV_HOPPER
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/** What was written before need not be seen. */
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
#if PKV_HOPPER
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_cluster_wait_acquire() {
#if PKV_HOPPER
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/** Makes barriers that this thread has initialised known to the cluster. */
__device__ __forceinline__ void fence_mbarrier_init() {
#if PKV_HOPPER
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/** The shared address of the same variable in the block of that rank. */
__device__ __forceinline__ uint32_t mapa(const void* pointer, int rank) {
  uint32_t address = shared_address(pointer);
#if PKV_HOPPER
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

/** Stores at an address of `mapa`; the barrier, in the same block, counts the bytes. */
__device__ __forceinline__ void st_async(uint32_t to, const int4& x, uint32_t barrier) {
#if PKV_HOPPER
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, "
      "[%1];" ::"r"(to),
      "r"(barrier), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
#endif
}
__device__ __forceinline__ void st_async(uint32_t to, uint32_t x, uint32_t barrier) {
#if PKV_HOPPER
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(to),
      "r"(barrier), "r"(x)
      : "memory");
#endif
}

/** True in one lane of the warp, and the compiler knows that it is one. From 9.0. */
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected = 0;
#if PKV_HOPPER
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
#endif
  return elected != 0;
}

// Kernels that overlap (programmatic dependent launch). From 9.0.

/** Until the kernel before has ended and its memory can be read. */
__device__ __forceinline__ void griddepcontrol_wait() {
#if PKV_HOPPER
  cudaGridDependencySynchronize();
#endif
}
/** The next kernel may start once all blocks have come here or ended. */
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if PKV_HOPPER
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Words of global memory that other blocks read and write, in the order of the GPU's memory model.

__device__ __forceinline__ void st_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void st_relaxed_gpu(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t ld_relaxed_gpu(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

/** Chooses a body of the graph that this kernel is a part of (conditional.h). */
__device__ __forceinline__ void set_condition(uint64_t handle, int value) {
#if CUDART_VERSION >= 12040
  cudaGraphSetConditional(handle, unsigned(value));
#endif
}

// Other loads.

/** By a shared address, which spares the compiler to make a pointer of it. */
__device__ __forceinline__ uint32_t ld_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/** Four 8 x 8 blocks of 16 bits; lanes 8 i to 8 i + 7 give the addresses of the rows of block i. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&blocks)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&blocks)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}

// Arithmetic.

__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rsqrt_approx_ftz(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/** NaN where one of them is. */
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
/** a b + c, cut to [0, 1]; 0 for NaN. */
__device__ __forceinline__ float fma_rn_sat(float a, float b, float c) {
  float y;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
/** As __byte_perm, which masks the selector first; here its digits have to be 0 to 7. */
__device__ __forceinline__ uint32_t prmt(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
  return bytes;
}

// Matrix products of a warp: sums += a b. Fragments as the PTX manual has them.

__device__ __forceinline__ void mma_m16n8k16_f16(float (&sums)[4], const uint32_t (&a)[4],
                                                 uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&sums)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k8_f16(float (&sums)[4], uint32_t a0, uint32_t a1,
                                                uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&sums)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(b));
}
/** Of bytes, as whole numbers with a sign (s8) or without (u8). */
#define PARISKV_MMA_OF_BYTES(name, types)                                               \
  __device__ __forceinline__ void name(int32_t (&sums)[4], const uint32_t (&a)[4],      \
                                       const uint32_t (&b)[2]) {                        \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." types                         \
                 ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
PARISKV_MMA_OF_BYTES(mma_m16n8k32_u8, "u8.u8")
PARISKV_MMA_OF_BYTES(mma_m16n8k32_s8, "s8.s8")
PARISKV_MMA_OF_BYTES(mma_m16n8k32_s8_u8, "s8.u8")
#undef PARISKV_MMA_OF_BYTES
/** Of bits: counts those that are set in both. */
__device__ __forceinline__ void mma_m16n8k128_b1_and_popc(int32_t (&sums)[4],
                                                          const uint32_t (&a)[2],
                                                          const uint32_t (&b)[1]) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}
__device__ __forceinline__ void mma_m16n8k256_b1_and_popc(int32_t (&sums)[4],
                                                          const uint32_t (&a)[4],
                                                          const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace ptx

}  // namespace pariskv::cuda::device
