/** Definitions of row_cache.cuh. */
#pragma once

#include "device/stores.cuh"
#include "pariskv/decode/attend/row_cache.cuh"

namespace pariskv::cuda::device {

/** How often a row tries for a slot when others are quicker. */
constexpr int kClaims = 4;

/** Neighbours in different sets: positions times 2^32 over the golden ratio. */
__device__ __forceinline__ int RowCache::set_of(int position) const {
  return int(__umulhi(uint32_t(position) * 0x9e3779b9u, uint32_t(sets)));
}

__device__ __forceinline__ uint64_t RowCache::tag_of(int position) const {
  return uint64_t(generation) << 32 | uint32_t(position + 1);
}

__device__ __forceinline__ void RowCache::prefetch(int rank, int size) const {
  if (!exists()) return;
  for (int set = rank * kThreads + int(threadIdx.x); set < sets; set += size * kThreads) {
    ptx::prefetch_global_l2(tags + 4 * set);
    ptx::prefetch_global_l2(stamps + 4 * set);
  }
}

__device__ __forceinline__ RowCache::Tags RowCache::tags_at(int position) const {
  if (!exists()) return {};
  const auto* set = reinterpret_cast<const ulonglong2*>(tags + 4 * set_of(position));
  return {__ldcg(set), __ldcg(set + 1)};
}

__device__ __forceinline__ int RowCache::find(const Tags& of_set, int position) const {
  const uint64_t tag = tag_of(position);
  const int way = of_set.first.x == tag    ? 0
                  : of_set.first.y == tag  ? 1
                  : of_set.second.x == tag ? 2
                  : of_set.second.y == tag ? 3
                                           : kNoSlot;
  return way == kNoSlot ? kNoSlot : 4 * set_of(position) + way;
}

__device__ __forceinline__ uint32_t RowCache::stamp(int slot) const {
  return atomicExch(stamps + slot, step);
}

__device__ __forceinline__ int RowCache::claim(int position) const {
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

__device__ __forceinline__ void KeepInCache::start(int begin, int end) const {
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

/**
 * Until no block of the cluster looks for rows any more, and all of them are stamped. A barrier
 * of the cluster would wait for rows on their way to this processor too.
 */
__device__ __forceinline__ void KeepInCache::meet() const {
  // What has come back is looked at, or nobody would wait for it.
  const uint32_t any = __syncthreads_or(stamped != 0) != 0;
  if (cluster.size == 1) return;
  const int thread = int(threadIdx.x);
  if (thread == 0) expect_mail(mail.looked, cluster.size * int(sizeof(uint32_t)));
  if (thread < cluster.size) send_mail(mail.looked, thread, &mail.words[cluster.rank], 1 + any);
  wait(&mail.looked, 0);
}

__device__ __forceinline__ int KeepInCache::slot_of(int row) const {
  return cache.exists() ? rows[row].fresh : kNoSlot;
}

__device__ __forceinline__ void KeepInCache::put(int slot, const char* tile,
                                                 const char* placed) const {
  if (!cache.exists()) return;
  RowStores::each(slot >= 0, [&](int lane) {
    const int to = RowStores::of_lane(slot, lane);
    const char* in_tile = tile + (warp_id() + kWarps * lane) * cache.row_bytes;
    RowStores::start(cache.row(to), placed != nullptr ? placed : in_tile, cache.row_bytes);
  });
}

__device__ __forceinline__ void KeepInCache::release() const { RowStores::wait_read(); }

__device__ __forceinline__ void KeepInCache::finish() { RowStores::wait_written(); }

}  // namespace pariskv::cuda::device
