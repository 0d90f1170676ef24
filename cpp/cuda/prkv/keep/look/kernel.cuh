/**
 * look_at_zone: keys become 8 bits, which later kernels find in scratch: they come from where rows
 * are, over the bus or not, this once. And the largest logit of each head of a query. look_at_pages
 * does so for digests of pages.
 */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

struct LookZoneSpace {
  int tops[kTalliesAtOnce];
  KeySources sources;
  TileSpace tile;  // the last one: keys follow
};
template <bool kPages>
constexpr int look_zone_bytes(int key_dim) {
  return int(sizeof(LookZoneSpace)) - int(sizeof(TileSpace)) + tile_bytes<kPages>(key_dim);
}

/** The largest of four neighbouring lanes, which have other rows for the same query. */
__device__ __forceinline__ int most_of_query(int x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}

template <int kChunks, bool kPages>
struct LookAtZone {
  const PRKVItem& item;
  LookZoneSpace& space;
  KeyTile<kChunks, kPages> tile;

  /** Some keys by a warp, for the kernels that follow: to row `to` of scratch on. */
  __device__ __forceinline__ void store(const char* keys, const float* steps, int to) const {
    constexpr int kOwn = KeyTile<kChunks, kPages>::kRows / (kLookThreads / 32);
    const int vectors = int(packed_bytes(tile.dim())) / 16, begin = device::warp_id() * kOwn;
    const int rows = min(kOwn, tile.rows - begin);
    for (int i = device::lane_id(); i < rows * vectors; i += 32) {
      const int row = begin + i / vectors, at = i % vectors;
      reinterpret_cast<uint4*>(item.key(to + row))[at] =
          reinterpret_cast<const uint4*>(keys + row * key_pitch(tile.dim()))[at];
    }
    if (device::lane_id() < rows) {
      const int row = begin + device::lane_id();
      item.steps()[to + row] = steps[row];
    }
  }

  __device__ __forceinline__ void find_tops(int begin, int end) const {
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) space.tops[q] = kNoLogit;
    __syncthreads();
    const VisibleFrom visible(tile, space.tile.seen_from);
    typename KeyTile<kChunks, kPages>::LaneRows lane;
    tile.load(lane);
    tile.each_query(begin, end, lane,
                    [&](int query, const QueryHead& query_head, const LaneLogits& logits) {
                      int top = kNoLogit;
#pragma unroll
                      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                          top = max(top, visible.logit(query_head, logits, n, i));
                      }
                      top = most_of_query(top);
                      if (device::lane_id() % 4 == 0 && top > space.tops[query - begin]) {
                        atomicMax(&space.tops[query - begin], top);
                      }
                    });
    __syncthreads();
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      int32_t* top = &item.tallies()[begin + q].top;
      // It only grows, so an old one tells enough.
      if (space.tops[q] > __ldcg(top)) atomicMax(top, space.tops[q]);
    }
    __syncthreads();
  }

  /** By a block whose warps have their keys. */
  __device__ __forceinline__ void run(int count) const {
    if constexpr (kPages) __syncthreads();
    __syncwarp();
    store(tile.keys, tile.steps, tile.first);
    if constexpr (kPages) store(tile.distances, tile.distance_steps, count + tile.first);
    const int queries = int(padded_queries(item.queries()));
    for (int q = 0; q < queries; q += kTalliesAtOnce) {
      find_tops(q, min(q + kTalliesAtOnce, queries));
    }
  }
};

template <typename Element, int kChunks>
__global__ void __launch_bounds__(kLookThreads, kLookBlocks<kChunks>)
    look_at_zone(const __grid_constant__ PRKVChoiceParams params) {
  extern __shared__ __align__(16) unsigned char zone_shared[];
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int count = item.numbers()->count, first = int(blockIdx.x) * kLookRows;
  if (first >= count) return;
  LookZoneSpace& space = *reinterpret_cast<LookZoneSpace*>(zone_shared);
  const auto tile = tile_in<kChunks, false>(item, space.tile, first, count);
  tile.load_reference(space.sources);
  if (int(threadIdx.x) < tile.rows) {
    const int row = first + int(threadIdx.x);
    space.sources.from[threadIdx.x] = params.copied ? item.copy(row) : item.row(row, 0);
    space.tile.seen_from[threadIdx.x] = item.position(row, 0);
  }
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < kRowsOfWarp; r += tile.kRowsAtOnce) {
    const int begin = tile.warp_begin() + r;
    const bool copies = item.wanted > 0 && !params.copied;
    tile.template round_keys<Element>(space.sources, begin,
                                      copies ? item.copy(first + begin) : nullptr);
  }
  LookAtZone<kChunks, false>{item, space, tile}.run(count);
}

/** Some digests, rounded, by a warp: middles less the reference, then distances. */
template <int kChunks>
__device__ __forceinline__ void round_digests(const KeyTile<kChunks, true>& tile,
                                              const PRKVItem& item, const float* reference,
                                              int begin) {
  using Tile = KeyTile<kChunks, true>;
  float x[2][Tile::kRowsAtOnce][kChunks][4] = {};
#pragma unroll
  for (int r = 0; r < Tile::kRowsAtOnce; ++r) {
    if (begin + r >= tile.rows) continue;
    const device::PageNumbers page =
        item.whole_page(int(item.pages().first) + tile.first + begin + r);
    const bool live = *page.live != 0;  // else it has no digest
    const float unit = live ? *page.unit : 0.0f;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int channel = Tile::channel(c);
        if (channel >= tile.dim()) continue;
        const auto* from = reinterpret_cast<const __half*>(page.digest) + part * tile.dim();
        float (&to)[4] = x[part][r][c];
        reinterpret_cast<const device::Neighbours<__half, 4>*>(from + channel)->to(to);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[i] = __fmul_rn(to[i], unit);
          if (part == 0) to[i] = __fsub_rn(to[i], reference[channel + i]);
          if (!live) to[i] = device::infinity();
        }
      }
    }
  }
  tile.round(x[0], begin, tile.keys, tile.steps);
  tile.round(x[1], begin, tile.distances, tile.distance_steps);
  __syncwarp();
  // A page is usable if both of its parts are.
  const int row = begin + device::lane_id();
  if (device::lane_id() < Tile::kRowsAtOnce && tile.distance_steps[row] == 0) tile.steps[row] = 0;
  __syncwarp();
}

template <int kChunks>
__global__ void __launch_bounds__(kLookThreads, kLookBlocks<kChunks>)
    look_at_pages(const __grid_constant__ PRKVChoiceParams params) {
  extern __shared__ __align__(16) unsigned char zone_shared[];
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int count = int(item.pages().count), first = int(blockIdx.x) * kRowsOfTile<true>;
  if (first >= count) return;
  LookZoneSpace& space = *reinterpret_cast<LookZoneSpace*>(zone_shared);
  const auto tile = tile_in<kChunks, true>(item, space.tile, first, count);
  tile.load_reference(space.sources);
  if (int(threadIdx.x) < tile.rows) {
    space.tile.seen_from[threadIdx.x] = item.seen_from<true>(first + int(threadIdx.x));
  }
  __syncthreads();
#pragma unroll 1
  for (int r = device::warp_id(); r < tile.kRows / tile.kRowsAtOnce; r += kLookThreads / 32) {
    round_digests<kChunks>(tile, item, space.sources.reference, r * tile.kRowsAtOnce);
  }
  LookAtZone<kChunks, true>{item, space, tile}.run(count);
}

}  // namespace pariskv::cuda
