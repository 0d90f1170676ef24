/** weigh_zone: the sum of the weights of each head of a query, over rows in 8 bits. */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/look/kernel.cuh"

namespace pariskv::cuda {

struct WeighZoneSpace {
  device::WeightTable table;
  int tops[kTalliesAtOnce];
  uint32_t sums[kTalliesAtOnce];  // of the block's rows: 2^24 each at most
};
static_assert(kLookRows * (uint64_t{1} << kWeightBits) < uint64_t{1} << 32);

template <int kChunks>
__global__ void __launch_bounds__(kLookThreads)
    weigh_zone(const __grid_constant__ PrkvChoiceParams params) {
  extern __shared__ __align__(16) unsigned char tile_shared[];
  __shared__ WeighZoneSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PrkvItem item(params, int(blockIdx.y));
  const int count = item.numbers()->count, first = int(blockIdx.x) * kLookRows;
  if (first >= count) return;
  static constexpr device::WeightTable kTable = device::make_weight_table();
  if (threadIdx.x < 64) space.table.of[threadIdx.x] = kTable.of[threadIdx.x];
  const KeyTile<kChunks> tile = load_tile<kChunks>(item, tile_shared, first, count);
  const int queries = item.queries();
  for (int begin = 0; begin < queries; begin += kTalliesAtOnce) {
    const int end = min(begin + kTalliesAtOnce, queries);
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      space.tops[q] = item.tallies()[begin + q].top, space.sums[q] = 0;
    }
    __syncthreads();
    tile.each_query(begin, end, [&](int query, int asked, bool counts, const LaneLogits& logits) {
      if (!counts) return;
      const int top = space.tops[query - begin];
      uint32_t sum = 0;
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = tile.row_of(n, i);
          if (!sees(item, asked, first + row, tile.steps[row])) continue;
          sum += device::weight_below(space.table, top - logits[n][i]);
        }
      }
      if (sum > 0) atomicAdd(&space.sums[query - begin], sum);
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
