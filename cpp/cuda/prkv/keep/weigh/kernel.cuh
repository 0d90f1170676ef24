/** weigh_zone: the sum of the weights of each head of a query, over rows in 8 bits, or over pages.
 */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

/** In the place of the largest logit of a query that sees no row: all weights are none. */
constexpr int kNoTop = 1 << 29;
__device__ __forceinline__ int top_of(const Tally& tally) {
  return tally.top == kNoLogit ? kNoTop : tally.top;
}

struct WeighZoneSpace {
  device::WeightTable table;
  int tops[kTalliesAtOnce];
  uint32_t sums[kTalliesAtOnce];  // of the block's rows: 2^24 each at most
};
static_assert(kLookRows * (uint64_t{1} << kWeightBits) < uint64_t{1} << 32);

/** The sum over four neighbouring lanes, which have other rows for the same query. */
__device__ __forceinline__ uint32_t sum_of_query(uint32_t x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <int kChunks, bool kPages>
__global__ void __launch_bounds__(kLookThreads, kLookBlocks<kChunks>)
    weigh_zone(const __grid_constant__ PRKVChoiceParams params) {
  extern __shared__ __align__(16) unsigned char tile_shared[];
  __shared__ WeighZoneSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int count = item.count<kPages>(), first = int(blockIdx.x) * kRowsOfTile<kPages>;
  if (first >= count) return;
  static constexpr device::WeightTable kTable = device::make_weight_table();
  if (threadIdx.x < 64) space.table.of[threadIdx.x] = kTable.of[threadIdx.x];
  const auto tile = load_tile<kChunks, kPages>(item, tile_shared, first, count);
  const VisibleFrom visible(tile, reinterpret_cast<TileSpace*>(tile_shared)->seen_from);
  typename KeyTile<kChunks, kPages>::LaneRows lane;
  tile.load(lane);
  const int queries = int(padded_queries(item.queries()));
  for (int begin = 0; begin < queries; begin += kTalliesAtOnce) {
    const int end = min(begin + kTalliesAtOnce, queries);
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      space.tops[q] = top_of(item.tallies()[begin + q]), space.sums[q] = 0;
    }
    __syncthreads();
    tile.each_query(
        begin, end, lane, [&](int query, const QueryHead& query_head, const LaneLogits& logits) {
          const int top = space.tops[query - begin];
          uint32_t sum = 0;
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              sum +=
                  device::weight_below(space.table, top - visible.logit(query_head, logits, n, i));
            }
          }
          sum = sum_of_query(sum);
          if (device::lane_id() % 4 == 0 && sum > 0) atomicAdd(&space.sums[query - begin], sum);
        });
    __syncthreads();
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      if (space.sums[q] == 0) continue;
      auto* sum = reinterpret_cast<unsigned long long*>(&item.tallies()[begin + q].sum);
      atomicAdd(sum, static_cast<unsigned long long>(space.sums[q]));
    }
    __syncthreads();
  }
}

}  // namespace pariskv::cuda
