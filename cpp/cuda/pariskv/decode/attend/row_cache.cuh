/**
 * Fetched rows of one kv head that stay on the device: see src/row_cache.h. In every step the
 * selected rows are looked up first, and the slots of found rows get the step's stamp. When all
 * blocks have done so, rows from elsewhere claim slots without it. So no block writes into a slot
 * that is read in the same step, whatever the steps are called. Definitions are in
 * row_cache_impl.cuh.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/mailbox.cuh"
#include "device/tiles.cuh"

namespace pariskv::cuda::device {

/** Slots of a set. The definitions know that they are four. */
constexpr int kWays = 4;

/** What `RowCache::find` and `claim` say when there is no slot. */
constexpr int kNoSlot = -1;

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
  __device__ __forceinline__ int set_of(int position) const;
  __device__ __forceinline__ uint64_t tag_of(int position) const;
  __device__ __forceinline__ char* row(int slot) const { return rows + int64_t(slot) * row_bytes; }

  /** Prefetches tags and stamps to the L2 cache: block `rank` of `size` its share. All threads. */
  __device__ __forceinline__ void prefetch(int rank, int size) const;

  /** Of the set of a position. */
  __device__ __forceinline__ Tags tags_at(int position) const;
  /** The slot of a row, by the tags of its set; kNoSlot: it is not there. */
  __device__ __forceinline__ int find(const Tags& of_set, int position) const;
  /** The slot is in use in this step: once the result has come back, every block sees that. */
  __device__ __forceinline__ uint32_t stamp(int slot) const;
  /** A slot for a row that is not there, whose tag is the row's from now on; or kNoSlot. */
  __device__ __forceinline__ int claim(int position) const;
};

/** Of a RowAttention: rows that are not in the cache yet are put there as they pass. */
struct KeepInCache {
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
  __device__ __forceinline__ void start(int begin, int end) const;
  /** Where a row is to be put; negative: nowhere. */
  __device__ __forceinline__ int slot_of(int row) const;
  /** Row `warp + kWarps * lane` of a tile, or the one `placed` where rows come in bulk, goes to
   * this lane's slot. All lanes of a warp. */
  __device__ __forceinline__ void put(int slot, const char* tile, const char* placed) const;
  /** Tiles that rows were put away from may be written again: after the next barrier. */
  __device__ __forceinline__ void release() const;
  /** Until all rows that this thread put are written: before a kernel ends. */
  static __device__ __forceinline__ void finish();

 private:
  __device__ __forceinline__ void meet() const;
};

}  // namespace pariskv::cuda::device
