/**
 * What the blocks of a cluster send one another: it goes straight into the other's shared memory,
 * and a barrier there counts the bytes. A barrier of the cluster would first wait for everything
 * that a block has stored anywhere, which takes longer than all the rest.
 */
#pragma once

#include "device/cluster.cuh"

namespace pariskv::cuda::device {

/**
 * Where what others send to a block arrives, and is counted. Exchanges of all with all come one
 * after the other: who sends the next one has had this one from everybody, so two barriers by turns
 * are enough, and so is memory for two exchanges: everybody has read what came before this one.
 * Besides there is what comes once. Nobody sends to who has left: all wait for all that is sent to
 * them. Of use once.
 */
struct Mail {
  uint64_t exchanges[2];
  uint64_t looked;  // word that a block has looked for its rows in the cache
  uint64_t parts;   // of attention to rows
  uint32_t words[kMaxCluster];

  /** All threads; on return everybody's is open. Of what is stored before, others see nothing. */
  __device__ __forceinline__ void open(const Cluster& cluster) {
#if PKV_HOPPER
    if (cluster.size == 1) return;
    if (threadIdx.x == 0) {
      init_barrier(&exchanges[0], 1);
      init_barrier(&exchanges[1], 1);
      init_barrier(&looked, 1);
      init_barrier(&parts, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  __device__ __forceinline__ uint64_t& of(int exchange) { return exchanges[exchange % 2]; }
  /** Until all of an exchange has come. */
  __device__ __forceinline__ void wait(int exchange) {
    device::wait(&of(exchange), uint32_t(exchange / 2 % 2));
  }
};

/** By one thread of who owns the barrier: so many bytes will come. */
__device__ __forceinline__ void expect_mail(uint64_t& barrier, int bytes) {
  arrive_and_expect(&barrier, uint32_t(bytes));
}

/** What has the address of `pointer` in another block of the cluster, or in this one. */
__device__ __forceinline__ uint32_t address_at(const void* pointer, int other) {
  uint32_t address = shared_address(pointer);
#if PKV_HOPPER
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(other));
#endif
  return address;
}

/** To the place `to` of another block, or of this one; the barrier there counts it. */
__device__ __forceinline__ void send_mail(uint64_t& barrier, int other, void* to, const int4& x) {
#if PKV_HOPPER
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, "
      "[%1];" ::"r"(address_at(to, other)),
      "r"(address_at(&barrier, other)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
#endif
}
__device__ __forceinline__ void send_mail(uint64_t& barrier, int other, void* to, uint32_t x) {
#if PKV_HOPPER
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(
                   address_at(to, other)),
               "r"(address_at(&barrier, other)), "r"(x)
               : "memory");
#endif
}

}  // namespace pariskv::cuda::device
