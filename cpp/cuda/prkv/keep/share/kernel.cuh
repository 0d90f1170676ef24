/**
 * share_zone: the rank of each row: its shares of the attention of all queries, summed over
 * positions, the mean over the group. If no query has a say, the later rows rank higher; all ones
 * are of a row that cannot be kept.
 */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/look/kernel.cuh"

namespace pariskv::cuda {

struct ShareZoneSpace {
  device::WeightTable table;
  int tops[kTalliesAtOnce];
  uint64_t reciprocals[kTalliesAtOnce];
};

template <int kChunks>
__global__ void __launch_bounds__(kLookThreads)
    share_zone(const __grid_constant__ PrkvChoiceParams params) {
  extern __shared__ __align__(16) unsigned char tile_shared[];
  __shared__ ShareZoneSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PrkvItem item(params, int(blockIdx.y));
  const ChosenHead numbers = *item.numbers();
  const int count = numbers.count, first = int(blockIdx.x) * kLookRows;
  if (first >= count) return;
  static constexpr device::WeightTable kTable = device::make_weight_table();
  if (threadIdx.x < 64) space.table.of[threadIdx.x] = kTable.of[threadIdx.x];
  const KeyTile<kChunks> tile = load_tile<kChunks>(item, tile_shared, first, count);
  const int queries = item.queries(), group = int(item.call.shape.group);
  uint64_t shares[kRowsOfWarp / 8][2] = {};
  for (int begin = 0; begin < queries; begin += kTalliesAtOnce) {
    const int end = min(begin + kTalliesAtOnce, queries);
    __syncthreads();  // all are done with the last ones
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      const Tally tally = item.tallies()[begin + q];
      space.tops[q] = tally.top;
      // As reciprocal_of.
      space.reciprocals[q] = tally.sum == 0 ? 0 : (uint64_t{1} << 63) / tally.sum;
    }
    __syncthreads();
    tile.each_query(begin, end, [&](int query, int asked, bool counts, const LaneLogits& logits) {
      if (!counts) return;
      const int top = space.tops[query - begin];
      const uint64_t reciprocal = space.reciprocals[query - begin];
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = tile.row_of(n, i);
          if (!sees(item, asked, first + row, tile.steps[row])) continue;
          const uint32_t weight = device::weight_below(space.table, top - logits[n][i]);
          shares[n][i] += device::share_with(weight, reciprocal);
        }
      }
    });
  }
#pragma unroll
  for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Eight lanes have other queries of the same rows.
      for (int step = 4; step < 32; step *= 2) {
        shares[n][i] += __shfl_xor_sync(~0u, shares[n][i], step);
      }
      const int row = tile.row_of(n, i);
      if (device::lane_id() >= 4 || row >= tile.rows) continue;
      const uint64_t rank =
          numbers.heard != 0 ? shares[n][i] / uint64_t(group) : uint64_t(first + row);
      item.ranks()[first + row] = tile.steps[row] > 0 ? rank : ~uint64_t{0};
    }
  }
}

}  // namespace pariskv::cuda
