/** trim_block: kept rows of a zone that was cut, without rows that are not in it any more. */
#pragma once

#include "kept/keep/fill/kernel.cuh"
#include "kept/keep/list/kernel.cuh"

namespace pariskv::cuda {

struct TrimParams {
  TrimCall call;
};

inline __global__ void __launch_bounds__(kFillThreads)
    trim_block(const __grid_constant__ TrimParams params) {
  const TrimCall& call = params.call;
  const int head = int(blockIdx.y);
  const device::KeptHead before{call.before, call.shape.kept(call.before_capacity), head};
  const device::KeptHead after{call.after, call.shape.kept(call.after_capacity), head};
  // Either kind is in order, so the first ones of each are left.
  __shared__ int left[2];
  const int attended = before.counts()[0], held = before.counts()[1];
  if (threadIdx.x < 2) {
    const bool of_held = threadIdx.x == 1;
    left[threadIdx.x] = smaller_than(before.positions() + (of_held ? attended : 0),
                                     of_held ? held : attended, int(call.zone_end));
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x < 2) after.counts()[threadIdx.x] = left[threadIdx.x];
  const int rows = left[0] + left[1], end = min(rows, int(blockIdx.x + 1) * kFillRows);
  for (int i = int(blockIdx.x) * kFillRows + device::warp_id(); i < end; i += kFillThreads / 32) {
    const int from = i < left[0] ? i : attended + i - left[0];
    copy_row(after.row(i), before.row(from), int(after.layout.row_bytes));
    if (device::lane_id() != 0) continue;
    after.positions()[i] = before.positions()[from];
    after.ages()[i] = before.ages()[from];
  }
}

}  // namespace pariskv::cuda
