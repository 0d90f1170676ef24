/**
 * Fetched rows of one kv head that stay on the device: see src/gpu/row_cache.h. In every step the
 * selected rows are looked up first, and the slots of found rows get the step's stamp. When all
 * blocks have done so, rows from elsewhere claim slots without it. So no block writes into a slot
 * that is read in the same step, whatever the steps are called.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/mailbox.cuh"
#include "device/stores.cuh"
#include "device/tiles.cuh"

namespace pariskv::cuda::device {

/** Slots of a set. The definitions know that they are four. */
constexpr int kWays = 4;

/** What `RowCache::find` and `claim` say when there is no slot. */
constexpr int kNoSlot = -1;

/** How often a row tries for a slot when others are quicker. */
constexpr int kClaims = 4;

struct RowCache {
  uint64_t* tags;    // (sets, 4); null: there is no cache
  uint32_t* stamps;  // (sets, 4)
  char* rows;        // (sets, 4, row_bytes)
  uint32_t row_bytes;
  int sets;  // a power of two, 4 or more
  uint32_t generation, step;

  /** The tags of one set. */
  struct Tags {
    ulonglong2 first, second;
  };

  __device__ __forceinline__ bool exists() const { return tags != nullptr; }
  /** Neighbours in different sets: positions times 2^32 over the golden ratio. */
  __device__ __forceinline__ int set_of(int position) const {
    return int(__umulhi(uint32_t(position) * 0x9e3779b9u, uint32_t(sets)));
  }
  __device__ __forceinline__ uint64_t tag_of(int position) const {
    return uint64_t(generation) << 32 | uint32_t(position + 1);
  }
  __device__ __forceinline__ char* row(int slot) const { return rows + int64_t(slot) * row_bytes; }

  /** Prefetches tags and stamps to the L2 cache: block `rank` of `size` its share. All threads. */
  __device__ __forceinline__ void prefetch(int rank, int size) const {
    if (!exists()) return;
    for (int set = rank * kThreads + int(threadIdx.x); set < sets; set += size * kThreads) {
      ptx::prefetch_global_l2(tags + 4 * set);
      ptx::prefetch_global_l2(stamps + 4 * set);
    }
  }

  /** Of the set of a position. */
  __device__ __forceinline__ Tags tags_at(int position) const {
    if (!exists()) return {};
    const auto* set = reinterpret_cast<const ulonglong2*>(tags + 4 * set_of(position));
    return {__ldcg(set), __ldcg(set + 1)};
  }
  /** The slot of a row, by the tags of its set; kNoSlot: it is not there. */
  __device__ __forceinline__ int find(const Tags& of_set, int position) const {
    const uint64_t tag = tag_of(position);
    const int way = of_set.first.x == tag    ? 0
                    : of_set.first.y == tag  ? 1
                    : of_set.second.x == tag ? 2
                    : of_set.second.y == tag ? 3
                                             : kNoSlot;
    return way == kNoSlot ? kNoSlot : 4 * set_of(position) + way;
  }
  /** The slot is in use in this step: once the result has come back, every block sees that. */
  __device__ __forceinline__ uint32_t stamp(int slot) const {
    return atomicExch(stamps + slot, step);
  }
  /** A slot for a row that is not there, whose tag is the row's from now on; or kNoSlot. */
  __device__ __forceinline__ int claim(int position) const {
    const int first = 4 * set_of(position);
#pragma unroll 1
    for (int i = 0; i < kClaims; ++i) {
      const uint4 used = __ldcg(reinterpret_cast<const uint4*>(stamps + first));
      // By age; 0 is this step's. A truncation leaves stamps from the future: the oldest of all.
      const uint32_t ages[4] = {step - used.x, step - used.y, step - used.z, step - used.w};
      int way = 0;
      uint32_t oldest = ages[0];
#pragma unroll
      for (int other = 1; other < 4; ++other) {
        if (ages[other] > oldest) oldest = ages[other], way = other;
      }
      if (oldest == 0) return kNoSlot;
      if (atomicCAS(stamps + first + way, step - oldest, step) == step - oldest) {
        tags[first + way] = tag_of(position);
        return first + way;
      }
    }
    return kNoSlot;
  }
};

/** Of a RowAttention: rows that are not in the cache yet are put there as they pass. */
struct CacheRows {
  const RowCache& cache;
  const Cluster& cluster;
  ClusterMailbox& mail;
  SelectedRow* rows;          // of this block; `fresh` is replaced by the slot
  uint32_t stamped;           // all results of `stamp` of this thread
  unsigned long long* found;  // rows that were there are added; null: they are not counted

  static constexpr int kFound = -1, kUnwanted = -2;  // in `fresh`

  /**
   * Waits until all blocks of the cluster have stamped slots, then claims slots for rows
   * [begin, end), whose copies are on their way. All threads; ends with a barrier if there is a
   * cache.
   */
  __device__ __forceinline__ void start(int begin, int end) const {
    if (!cache.exists()) return;
    meet();
    int there = 0;
    for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
      const int position = rows[i].fresh;
      if (position >= 0) rows[i].fresh = cache.claim(position);
      there += position == kFound;
    }
    there = __reduce_add_sync(~0u, there);
    if (found != nullptr && there > 0 && lane_id() == 0) {
      atomicAdd(found, static_cast<unsigned long long>(there));
    }
    __syncthreads();
  }
  /** Where a row is to be put; negative: nowhere. */
  __device__ __forceinline__ int slot_of(int row) const {
    return cache.exists() ? rows[row].fresh : kNoSlot;
  }
  /** Row `warp + kWarps * lane` of a tile, whose copy `copy_of` has, goes to this lane's slot. All
   * lanes of a warp. */
  template <typename CopyOf>
  __device__ __forceinline__ void put(int slot, CopyOf copy_of) const {
    if (!cache.exists()) return;
    RowStores::each(slot >= 0, [&](int lane) {
      const int to = RowStores::of_lane(slot, lane);
      RowStores::start(cache.row(to), copy_of(warp_id() + kWarps * lane), cache.row_bytes);
    });
  }
  /** Tiles that rows were put away from may be written again: after the next barrier. */
  __device__ __forceinline__ void release() const { RowStores::wait_read(); }
  /** Until all rows that this thread put are written: before a kernel ends. */
  static __device__ __forceinline__ void finish() { RowStores::wait_written(); }

 private:
  /**
   * Until no block of the cluster looks for rows any more, and all of them are stamped. A barrier
   * of the cluster would wait for rows on their way to this processor too.
   */
  __device__ __forceinline__ void meet() const {
    // What has come back is looked at, or nobody would wait for it.
    const uint32_t any = __syncthreads_or(stamped != 0) != 0;
    if (cluster.size == 1) return;
    const int thread = int(threadIdx.x);
    if (thread == 0) expect_mail(mail.looked, cluster.size * int(sizeof(uint32_t)));
    if (thread < cluster.size) send_mail(mail.looked, thread, &mail.words[cluster.rank], 1 + any);
    wait(&mail.looked, 0);
  }
};

}  // namespace pariskv::cuda::device
