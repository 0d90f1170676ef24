/**
 * copy_listed: keys of the rows that a refresh looks at come over the bus, by a few blocks, so that
 * another choice computes beside them.
 */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

constexpr int kCopyThreads = 256;

inline __global__ void __launch_bounds__(kCopyThreads)
    copy_listed(const __grid_constant__ PRKVChoiceParams params) {
  constexpr int kRows = 8, kOwn = 4;  // of a warp; vectors of a lane that are on their way together
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int count = item.numbers()->count, vectors = int(item.call.shape.rows.key_bytes()) / 16;
  const int warps = int(gridDim.x) * (kCopyThreads / 32);
  int first = (int(blockIdx.x) * (kCopyThreads / 32) + device::warp_id()) * kRows;
#pragma unroll 1
  for (; first < count; first += warps * kRows) {
    const int all = min(kRows, count - first) * vectors;
#pragma unroll 1
    for (int begin = device::lane_id(); begin < all; begin += 32 * kOwn) {
      uint4 own[kOwn];
#pragma unroll
      for (int u = 0; u < kOwn; ++u) {
        const int i = begin + 32 * u, row = i / vectors;
        if (i >= all) continue;
        own[u] = reinterpret_cast<const uint4*>(item.row(first + row, 0))[i - row * vectors];
      }
#pragma unroll
      for (int u = 0; u < kOwn; ++u) {
        const int i = begin + 32 * u;
        if (i < all) reinterpret_cast<uint4*>(item.copy(first))[i] = own[u];
      }
    }
  }
}

}  // namespace pariskv::cuda
