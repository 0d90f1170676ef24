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

  __device__ __forceinline__ void run() const {
    const int first = tile.first, rows = tile.rows;
    for (int i = int(threadIdx.x); i < kAskedAtMost * kLookRows; i += kLookThreads) {
      space.logits[i / kLookRows][i % kLookRows] = kNoLogit;
    }
    for (int d = int(threadIdx.x); d < tile.dim(); d += kLookThreads) {
      space.sources.reference[d] = item.reference()[d];
    }
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
    typename KeyTile<kChunks>::Lane lane;
    tile.load(lane);
    tile.each_query(0, queries, lane, [&](int query, const Voice& voice, const LaneLogits& logits) {
      if (voice.end == 0) return;
      int* of_position = space.logits[query / group];
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) atomicMax(&of_position[tile.row_of(n, i)], logits[n][i]);
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
