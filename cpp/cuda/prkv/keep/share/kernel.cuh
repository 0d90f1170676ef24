/**
 * share_zone: the rank of each row, or page: its shares of the attention of all queries, summed
 * over positions, the mean over the group. If no query is finite, the later ones rank higher; all
 * ones are of a row that cannot be kept.
 */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/weigh/kernel.cuh"

namespace pariskv::cuda {

struct ShareZoneSpace {
  device::WeightTable table;
  int tops[kTalliesAtOnce];
  uint64_t reciprocals[kTalliesAtOnce];
  uint64_t parts[kLookThreads / 32][kRowsOfWarp];  // of warps that have the same pages
};

template <int kChunks, bool kPages>
__global__ void __launch_bounds__(kLookThreads, kLookBlocks<kChunks>)
    share_zone(const __grid_constant__ PRKVChoiceParams params) {
  extern __shared__ __align__(16) unsigned char tile_shared[];
  __shared__ ShareZoneSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int count = item.count<kPages>(), first = int(blockIdx.x) * kRowsOfTile<kPages>;
  if (first >= count) return;
  const bool has_query = item.numbers()->has_query != 0;
  static constexpr device::WeightTable kTable = device::make_weight_table();
  if (threadIdx.x < 64) space.table.of[threadIdx.x] = kTable.of[threadIdx.x];
  const auto tile = load_tile<kChunks, kPages>(item, tile_shared, first, count);
  const VisibleFrom visible(tile, reinterpret_cast<TileSpace*>(tile_shared)->seen_from);
  typename KeyTile<kChunks, kPages>::LaneRows lane;
  tile.load(lane);
  const int queries = int(padded_queries(item.queries()));
  uint64_t shares[kColumns][2] = {};
  for (int begin = 0; begin < queries; begin += kTalliesAtOnce) {
    const int end = min(begin + kTalliesAtOnce, queries);
    __syncthreads();  // all are done with the last ones
    for (int q = int(threadIdx.x); q < end - begin; q += kLookThreads) {
      const Tally tally = item.tallies()[begin + q];
      space.tops[q] = top_of(tally);
      // As reciprocal_of.
      space.reciprocals[q] = tally.sum == 0 ? 0 : (uint64_t{1} << 63) / tally.sum;
    }
    __syncthreads();
    tile.each_query(
        begin, end, lane, [&](int query, const QueryHead& query_head, const LaneLogits& logits) {
          const int top = space.tops[query - begin];
          const uint64_t reciprocal = space.reciprocals[query - begin];
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t weight =
                  device::weight_below(space.table, top - visible.logit(query_head, logits, n, i));
              shares[n][i] += device::share_with(weight, reciprocal);
            }
          }
        });
  }
  // Eight lanes have other queries of the same rows.
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int step = 4; step < 32; step *= 2) {
        shares[n][i] += __shfl_xor_sync(~0u, shares[n][i], step);
      }
      if (device::lane_id() < 4) {
        space.parts[device::warp_id()][tile.row_of(n, i) - tile.warp_begin()] = shares[n][i];
      }
    }
  }
  __syncthreads();
  const int row = int(threadIdx.x);
  if (row >= tile.rows) return;
  uint64_t share = space.parts[row / kRowsOfWarp][row % kRowsOfWarp];
  for (int warp = 1; kPages && warp < kLookThreads / 32; ++warp) share += space.parts[warp][row];
  const uint64_t rank = has_query ? share / uint64_t(item.call.shape.group) : uint64_t(first + row);
  item.ranks()[first + row] = tile.steps[row] > 0 ? rank : ~uint64_t{0};
}

}  // namespace pariskv::cuda
