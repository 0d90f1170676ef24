/**
 * weigh_rows: the logits of one position become weights, and their sums are taken. A block for each
 * position of a head.
 */
#pragma once

#include "device/signal.cuh"
#include "device/warp.cuh"
#include "kept/keep/item.cuh"
#include "kept/keep/pool.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kWeighThreads = 256;
constexpr int kWeighWarps = kWeighThreads / 32;

/** The sum over all threads, in all of them. Has barriers; `room` is a barrier's own. */
__device__ __forceinline__ uint64_t sum_of_block(uint64_t x, uint64_t (&room)[kWeighWarps]) {
  const auto of_warp = uint64_t(device::warp_sum(int64_t(x)));
  __syncthreads();
  if (device::lane_id() == 0) room[device::warp_id()] = of_warp;
  __syncthreads();
  uint64_t sum = 0;
  for (int warp = 0; warp < kWeighWarps; ++warp) sum += room[warp];
  return sum;
}

inline __global__ void __launch_bounds__(kWeighThreads)
    weigh_rows(const __grid_constant__ ChoiceParams params) {
  __shared__ device::WeightTable table;
  __shared__ uint64_t room[kWeighWarps];
  __shared__ int tops[kWeighWarps];
  device::let_successor_start();
  device::wait_for_predecessor();
  const ChoiceItem item(params, int(blockIdx.y));
  const int asked = int(blockIdx.x);
  if (asked >= item.positions_asked()) return;
  static constexpr device::WeightTable kTable = device::make_weight_table();
  if (threadIdx.x < 64) table.of[threadIdx.x] = kTable.of[threadIdx.x];
  const int count = item.numbers()->count;
  int32_t* rows = item.logits(asked);
  int top = kNoLogit;
  for (int j = int(threadIdx.x); j < count; j += kWeighThreads) top = max(top, rows[j]);
  top = __reduce_max_sync(~0u, top);
  if (device::lane_id() == 0) tops[device::warp_id()] = top;
  __syncthreads();
  for (int warp = 0; warp < kWeighWarps; ++warp) top = max(top, tops[warp]);

  uint64_t sum = 0;
  for (int j = int(threadIdx.x); j < count; j += kWeighThreads) {
    const int logit = rows[j];
    const uint32_t weight = logit == kNoLogit ? 0 : device::weight_below(table, top - logit);
    rows[j] = int32_t(weight);
    sum += weight;
  }
  sum = sum_of_block(sum, room);  // and all weights are written
  uint64_t pooled = 0;
  const int reach = int(item.call.rules.pool) / 2;
  for (int j = int(threadIdx.x); j < count; j += kWeighThreads) {
    pooled += pooled_weight(rows, j, count, reach);
  }
  pooled = sum_of_block(pooled, room);
  // As reciprocal_of.
  if (threadIdx.x < 2) {
    const uint64_t all = threadIdx.x == 0 ? sum : pooled;
    item.reciprocals()[2 * asked + threadIdx.x] = all == 0 ? 0 : (uint64_t{1} << 63) / all;
  }
}

}  // namespace pariskv::cuda
