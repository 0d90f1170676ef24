/** trim_pages: amended pages of a zone that was cut, without those that are not in it any more. */
#pragma once

#include "device/warp.cuh"
#include "prkv/blocks.cuh"
#include "prkv/params.h"

namespace pariskv::cuda {

constexpr int kTrimThreads = 256;

/** A block for each head, and a warp for one page at a time. */
inline __global__ void __launch_bounds__(kTrimThreads)
    trim_pages(const __grid_constant__ PRKVTrimParams params) {
  const TrimCall& call = params.call.kept;
  const int head = int(blockIdx.x);
  const device::AmendedHead before{call.before, amended_of(call.shape, call.before_capacity), head};
  const device::AmendedHead after{call.after, amended_of(call.shape, call.after_capacity), head};
  if (head == 0 && threadIdx.x == 0) *after.split() = *before.split();
  if (!params.call.rules.has_pages()) return;
  const int64_t* numbers = before.numbers();
  const int count = int(*before.count());
  const auto is_left = [&](int i) {
    return i < count && numbers[i] * params.call.rules.page < call.zone_end;
  };
  // They are in order, so the first ones are left.
  if (threadIdx.x == 0 && !is_left(0)) *after.count() = 0;
  for (int i = device::warp_id(); is_left(i); i += kTrimThreads / 32) {
    const device::PageNumbers from = before.page(i), to = after.page(i);
    const uint64_t live = *from.live;
    if (device::lane_id() == 0) {
      after.numbers()[i] = numbers[i];
      *to.live = live, *to.unit = *from.unit;
      if (!is_left(i + 1)) *after.count() = i + 1;
    }
    if (live == 0) continue;  // it has no digest
    for (int w = device::lane_id(); w < int(call.shape.rows.key_dim); w += 32) {
      reinterpret_cast<uint32_t*>(to.digest)[w] = reinterpret_cast<const uint32_t*>(from.digest)[w];
    }
  }
}

}  // namespace pariskv::cuda
