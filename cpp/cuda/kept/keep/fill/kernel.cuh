/** fill_block: the rows that were chosen, to their block: a warp copies one at a time. */
#pragma once

#include "device/signal.cuh"
#include "device/warp.cuh"
#include "kept/keep/item.cuh"

namespace pariskv::cuda {

constexpr int kFillThreads = 256;
constexpr int kFillRows = 32;  // of a block

/** By a warp; rows are whole pieces of 16 bytes. */
__device__ __forceinline__ void copy_row(char* to, const char* from, int bytes) {
  for (int at = device::lane_id(); at < bytes / 16; at += 32) {
    reinterpret_cast<uint4*>(to)[at] = reinterpret_cast<const uint4*>(from)[at];
  }
}

inline __global__ void __launch_bounds__(kFillThreads)
    fill_block(const __grid_constant__ ChoiceParams params) {
  device::wait_for_predecessor();
  const ChoiceItem item(params, int(blockIdx.y));
  const device::KeptHead after = item.after();
  const int rows = after.counts()[0] + after.counts()[1], kept = item.numbers()->kept;
  const int end = min(rows, int(blockIdx.x + 1) * kFillRows);
#pragma unroll 2
  for (int i = int(blockIdx.x) * kFillRows + device::warp_id(); i < end; i += kFillThreads / 32) {
    copy_row(after.row(i), item.row(item.picked()[i], kept), int(after.layout.row_bytes));
  }
}

}  // namespace pariskv::cuda
