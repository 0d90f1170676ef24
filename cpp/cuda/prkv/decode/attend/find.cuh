/**
 * The exact best pages of a head, by the blocks of its cluster: each has a share of the scores, and
 * leaves its best pages for all blocks.
 */
#pragma once

#include "device/topk.cuh"
#include "prkv/decode/context.cuh"

namespace pariskv::cuda {

/** Of a block, in shared memory. */
struct FindSpace {
  device::TopKSpace top_k;
  device::CompactSpace select;
};

struct FindPages {
  const PageAttendParams& params;
  const PageContext& context;
  const PageScratch& scratch;
  const device::Cluster& cluster;
  FindSpace& space;
  uint32_t* room;  // shared memory for keys
  int room_keys;

  /** A score as a key that sorts as scores do, above 0; 0: no page. */
  static __device__ __forceinline__ uint32_t key_of(float score) {
    return score == -device::infinity() ? 0 : device::sortable(__fadd_rn(score, 0.0f));
  }

  /** Pages with live rows. */
  __device__ __forceinline__ int count_live() const {
    int live = 0;
    for (int i = device::lane_id(); i < params.score_blocks; i += 32) {
      live += __ldcg(&scratch.search->live[i]);
    }
    return __reduce_add_sync(~0u, live);
  }
  /** Of the pages before `end`. */
  __device__ __forceinline__ int live_before(int end) const {
    int live = 0;
#pragma unroll 1
    for (int base = 0; base < end; base += device::kThreads) {
      const int i = base + int(threadIdx.x);
      live += __syncthreads_count(i < end && key_of(__ldcg(scratch.scores + i)) != 0);
    }
    return live;
  }

  /** Those that pass, of this block's pages from `first` on, to where all blocks see them. */
  template <typename KeyAt>
  __device__ __forceinline__ void find(int first, int count, int wanted, KeyAt key_at) const {
    const int live = count_live();
    device::Cut cut{0, 0, 0, live};  // all that are not 0
    if (live > wanted) {
      cut = device::find_top_k(cluster, count, wanted, key_at, space.top_k,
                               [](const bool (&)[device::kKeysInRegisters]) {});
    } else {
      cut.offset = live_before(first);
    }
    if (threadIdx.x == 0) space.select.cut = cut;
    __syncthreads();
    device::compact_keys(count, key_at, space.select, [&](int index, int i, int) {
      scratch.found[index] = {__ldcg(scratch.live + first + i), first + i};
    });
  }

  /** Returns how many are found. All threads of all blocks; ends with a barrier of the cluster. */
  __device__ __forceinline__ int run(int wanted) const {
    if (wanted > 0 && __ldcg(&scratch.search->asking) == 0) wanted = 0;
    if (wanted == 0) {
      if (cluster.rank == 0 && threadIdx.x == 0) scratch.search->found = 0;
      return 0;
    }
    const int first = device::part_begin(context.pages, cluster.first_part());
    const int count = device::part_begin(context.pages, cluster.end_part()) - first;
    if (count <= room_keys) {
      for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
        room[i] = key_of(__ldcg(scratch.scores + first + i));
      }
      __syncthreads();
      find(first, count, wanted, [&](int i) { return room[i]; });
    } else {
      find(first, count, wanted, [&](int i) { return key_of(__ldcg(scratch.scores + first + i)); });
    }
    const int found = space.select.cut.count;
    if (cluster.rank == 0 && threadIdx.x == 0) scratch.search->found = found;
    cluster.sync();
    return found;
  }
};

}  // namespace pariskv::cuda
