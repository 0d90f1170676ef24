/**
 * look_at_zone: keys become 8 bits, which later kernels find in scratch: they come from where rows
 * are, over the bus or not, this once. And the largest logit of each head of a query.
 */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

/** Queries whose tallies a block has in shared memory at a time. */
constexpr int kTalliesAtOnce = 512;

struct LookZoneSpace {
  int tops[kTalliesAtOnce];
  float steps[kLookRows];
  KeySources sources;
  // and (kLookRows, key_pitch) bytes of keys
};
constexpr int look_zone_bytes(int key_dim) {
  return int(sizeof(LookZoneSpace)) + kLookRows * key_pitch(key_dim);
}

template <typename Element, int kChunks>
struct LookAtZone {
  const PrkvItem& item;
  LookZoneSpace& space;
  KeyTile<kChunks> tile;

  /** A warp's keys, for the kernels that follow. */
  __device__ __forceinline__ void store() const {
    const int vectors = int(key_bytes(tile.dim())) / 16, begin = tile.warp_begin();
    const int rows = min(kRowsOfWarp, tile.rows - begin);
    for (int i = device::lane_id(); i < rows * vectors; i += 32) {
      const int row = i / vectors, at = i - row * vectors;
      reinterpret_cast<uint4*>(item.key(tile.first + begin + row))[at] =
          reinterpret_cast<const uint4*>(tile.key(begin + row))[at];
    }
    if (device::lane_id() < rows) {
      const int row = begin + device::lane_id();
      item.steps()[tile.first + row] = space.steps[row];
    }
  }

  __device__ __forceinline__ void find_tops(int begin, int end) const {
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) space.tops[q] = kNoLogit;
    __syncthreads();
    tile.each_query(begin, end, [&](int query, int asked, bool counts, const LaneLogits& logits) {
      if (!counts) return;
      int top = kNoLogit;
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = tile.row_of(n, i);
          if (sees(item, asked, tile.first + row, space.steps[row])) top = max(top, logits[n][i]);
        }
      }
      if (top != kNoLogit) atomicMax(&space.tops[query - begin], top);
    });
    __syncthreads();
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      int32_t* top = &item.tallies()[begin + q].top;
      // It only grows, so an old one tells enough.
      if (space.tops[q] > __ldcg(top)) atomicMax(top, space.tops[q]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() const {
    for (int d = int(threadIdx.x); d < tile.dim(); d += kLookThreads) {
      space.sources.reference[d] = item.reference()[d];
    }
    if (int(threadIdx.x) < tile.rows) {
      space.sources.from[threadIdx.x] = item.row(tile.first + int(threadIdx.x), 0);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < kRowsOfWarp; r += tile.kRowsAtOnce) {
      tile.template round_keys<Element>(space.sources, tile.warp_begin() + r);
    }
    __syncwarp();
    store();
    const int queries = item.queries();
    for (int q = 0; q < queries; q += kTalliesAtOnce) {
      find_tops(q, min(q + kTalliesAtOnce, queries));
    }
  }
};

template <typename Element, int kChunks>
__global__ void __launch_bounds__(kLookThreads)
    look_at_zone(const __grid_constant__ PrkvChoiceParams params) {
  extern __shared__ __align__(16) unsigned char zone_shared[];
  device::let_successor_start();
  device::wait_for_predecessor();
  const PrkvItem item(params, int(blockIdx.y));
  const int count = item.numbers()->count, first = int(blockIdx.x) * kLookRows;
  if (first >= count) return;
  LookZoneSpace& space = *reinterpret_cast<LookZoneSpace*>(zone_shared);
  LookAtZone<Element, kChunks>{item,
                               space,
                               {item, space.steps, reinterpret_cast<char*>(&space + 1), first,
                                min(kLookRows, count - first)}}
      .run();
}

}  // namespace pariskv::cuda
