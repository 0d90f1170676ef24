/**
 * Messages between the blocks of a cluster: they are stored straight into the receiver's shared
 * memory, and a barrier there counts the bytes. A barrier of the cluster would first wait for all
 * that a block has stored to global memory, which takes longer than everything else here.
 */
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/ptx.cuh"

namespace pariskv::cuda::device {

/**
 * The barriers at which a block receives messages. Single use: a kernel opens it once.
 *
 * In an exchange every block sends to every block. Exchanges follow one another, and two barriers
 * and two buffers, by turns, are enough: a block sends exchange n + 1 when it has received exchange
 * n from all blocks, and by then they all have read exchange n - 1. The other two barriers are for
 * one message from each block.
 *
 * A block must not exit before it received all its messages.
 */
struct ClusterMailbox {
  uint64_t exchanges[2];
  uint64_t looked;  // messages that a block has looked for its rows in the cache, in `words`
  uint64_t parts;   // of attention to rows
  uint32_t words[kMaxCluster];

  /**
   * By all threads. When it returns, all blocks have opened theirs; it does not make other stores
   * of one block visible to another.
   */
  __device__ __forceinline__ void open(const Cluster& cluster) {
    if (!kHopper || cluster.size == 1) return;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&exchanges[0], 1);
      ptx::mbarrier_init(&exchanges[1], 1);
      ptx::mbarrier_init(&looked, 1);
      ptx::mbarrier_init(&parts, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait_acquire();
  }

  __device__ __forceinline__ uint64_t& of(int exchange) { return exchanges[exchange % 2]; }
  /** Until all messages of an exchange have come. */
  __device__ __forceinline__ void wait(int exchange) {
    device::wait(&of(exchange), uint32_t(exchange / 2 % 2));
  }
};

/** By one thread of the receiver: that many bytes will come. */
__device__ __forceinline__ void expect_mail(uint64_t& barrier, int bytes) {
  ptx::mbarrier_arrive_expect_tx(&barrier, uint32_t(bytes));
}

/** To `to` in block `rank` of the cluster, this one or another; `barrier` there counts the bytes.
 */
__device__ __forceinline__ void send_mail(uint64_t& barrier, int rank, void* to, const int4& x) {
  ptx::st_async(ptx::mapa(to, rank), x, ptx::mapa(&barrier, rank));
}
__device__ __forceinline__ void send_mail(uint64_t& barrier, int rank, void* to, uint32_t x) {
  ptx::st_async(ptx::mapa(to, rank), x, ptx::mapa(&barrier, rank));
}

}  // namespace pariskv::cuda::device
