/**
 * share_out: the share of the attention that each row gets, and its rank, over all positions. If no
 * query is finite, the later rows rank higher; all ones are of a row that cannot be kept.
 */
#pragma once

#include "device/signal.cuh"
#include "kept/keep/item.cuh"
#include "kept/keep/pool.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kShareRows = 64;   // of a block
constexpr int kShareSplits = 4;  // threads that share the positions of a row
constexpr int kShareThreads = kShareRows * kShareSplits;

inline __global__ void __launch_bounds__(kShareThreads)
    share_out(const __grid_constant__ ChoiceParams params) {
  __shared__ uint64_t sums[kShareSplits][2][kShareRows];
  device::let_successor_start();
  device::wait_for_predecessor();
  const ChoiceItem item(params, int(blockIdx.y));
  const ChosenHead numbers = *item.numbers();
  const int count = numbers.count;
  const int first = int(blockIdx.x) * kShareRows;
  if (first >= count) return;
  const int own = int(threadIdx.x) % kShareRows, split = int(threadIdx.x) / kShareRows;
  const int row = first + own, reach = int(item.call.rules.pool) / 2;
  uint64_t share = 0, rank = 0;
  if (row < count) {
    const uint64_t* reciprocals = item.reciprocals();
    for (int asked = split; asked < item.positions_asked(); asked += kShareSplits) {
      const int32_t* weights = item.logits(asked);
      share += device::share_with(uint32_t(weights[row]), reciprocals[2 * asked]);
      rank +=
          device::share_with(pooled_weight(weights, row, count, reach), reciprocals[2 * asked + 1]);
    }
  }
  sums[split][0][own] = share, sums[split][1][own] = rank;
  __syncthreads();
  if (split >= 2 || row >= count) return;
  uint64_t sum = 0;
  for (int other = 0; other < kShareSplits; ++other) sum += sums[other][split][own];
  if (split == 0) {
    item.shares()[row] = sum;
  } else {
    const uint64_t rank_of_usable = numbers.has_query != 0 ? sum : uint64_t(row);
    item.ranks()[row] = item.usable()[row] != 0 ? rank_of_usable : ~uint64_t{0};
  }
}

}  // namespace pariskv::cuda
