/**
 * look_at_keys: the logit of every row for the query of every position, in whole steps, the largest
 * of the group. A block has some rows and a warp some of these: it rounds their keys to 8 bits,
 * less the reference, and multiplies them with all queries on tensor cores.
 */
#pragma once

#include "device/signal.cuh"
#include "kept/keep/keys.cuh"

namespace pariskv::cuda {

constexpr int kAskedAtMost = 32;  // positions

struct LookSpace {
  int logits[kAskedAtMost][kLookRows];
  int positions[kLookRows];
  float steps[kLookRows];
  KeySources sources;
  // and (kLookRows, key_pitch) bytes of keys
};

template <typename Element, int kChunks>
struct LookAtKeys {
  const ChoiceItem& item;
  LookSpace& space;
  int kept;  // ChosenHead's
  KeyTile<kChunks> tile;

  /** The largest logits of a position whose queries are in lanes 4 apart. */
  __device__ __forceinline__ void put(int asked, const QueryHead& query_head,
                                      const LaneLogits& logits, int group) const {
    const bool writes = asked < item.positions_asked() && device::lane_id() / 4 % group == 0;
#pragma unroll
    for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int largest = query_head.visible_end != 0 ? logits[n][i] : kNoLogit;
        for (int step = 1; step < group; step *= 2) {
          largest = max(largest, __shfl_xor_sync(~0u, largest, 4 * step));
        }
        if (writes) space.logits[asked][tile.row_of(n, i)] = largest;
      }
    }
  }
  /** The same, of queries that lie anywhere. */
  __device__ __forceinline__ void join(int asked, const LaneLogits& logits) const {
#pragma unroll
    for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        atomicMax(&space.logits[asked][tile.row_of(n, i)], logits[n][i]);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int first = tile.first, rows = tile.rows;
    for (int i = int(threadIdx.x); i < item.positions_asked() * kLookRows; i += kLookThreads) {
      space.logits[i / kLookRows][i % kLookRows] = kNoLogit;
    }
    tile.load_reference(space.sources);
    if (int(threadIdx.x) < rows) {
      const int row = first + int(threadIdx.x);
      space.sources.from[threadIdx.x] = item.row(row, kept);
      space.positions[threadIdx.x] = item.position(row, kept);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < kRowsOfWarp; r += tile.kRowsAtOnce) {
      tile.template round_keys<Element>(space.sources, tile.warp_begin() + r);
    }
    __syncwarp();
    const int group = int(item.call.shape.group);
    const int queries = int(padded_queries(item.positions_asked() * group));
    typename KeyTile<kChunks>::LaneRows lane;
    tile.load(lane);
    // Lanes that have the queries of one position.
    const bool together = 8 % group == 0;
    tile.each_query(0, queries, lane,
                    [&](int query, const QueryHead& query_head, const LaneLogits& logits) {
                      if (together) {
                        put(query / group, query_head, logits, group);
                      } else if (query_head.visible_end != 0) {
                        join(query / group, logits);
                      }
                    });
    __syncthreads();
    if (int(threadIdx.x) < rows) {
      item.usable()[first + int(threadIdx.x)] = space.steps[threadIdx.x] > 0;
    }
    for (int i = int(threadIdx.x); i < item.positions_asked() * kLookRows; i += kLookThreads) {
      const int asked = i / kLookRows, row = i % kLookRows;
      if (row >= rows) continue;
      const bool seen =
          space.steps[row] > 0 && space.positions[row] <= int(item.job.asked.begin) + asked;
      item.logits(asked)[first + row] = seen ? space.logits[asked][row] : kNoLogit;
    }
  }
};

template <typename Element, int kChunks>
__global__ void __launch_bounds__(kLookThreads)
    look_at_keys(const __grid_constant__ ChoiceParams params) {
  extern __shared__ __align__(16) unsigned char look_shared[];
  device::let_successor_start();
  device::wait_for_predecessor();
  const ChoiceItem item(params, int(blockIdx.y));
  const ChosenHead numbers = *item.numbers();
  const int first = int(blockIdx.x) * kLookRows;
  if (first >= numbers.count) return;
  LookSpace& space = *reinterpret_cast<LookSpace*>(look_shared);
  LookAtKeys<Element, kChunks>{item,
                               space,
                               numbers.kept,
                               {item, space.steps, reinterpret_cast<char*>(&space + 1), first,
                                min(kLookRows, numbers.count - first)}}
      .run();
}

}  // namespace pariskv::cuda
