/** Definitions of early_rows.cuh. */
#pragma once

#include "device/copy.cuh"
#include "pariskv/decode/attend/early_rows.cuh"

namespace pariskv::cuda {

__device__ __forceinline__ void EarlyRows::open() {
  device::ptx::mbarrier_init(&arrived, 1);
  count = 0;
}

template <typename Find>
__device__ __forceinline__ int EarlyRows::start(int row_bytes, Find find) {
  const int place = atomicAdd(&count, 1);
  if (place >= min(kEarlyBytes / row_bytes, kEarlyRows)) return 0;
  const device::SelectedRow row = find();
  device::RowCopies::expect(&arrived, uint32_t(row_bytes));
  device::RowCopies::start(rows + place * row_bytes, reinterpret_cast<const char*>(row.address),
                           uint32_t(row_bytes), &arrived);
  list[place] = row;
  return place + 1;
}

__device__ __forceinline__ void EarlyRows::close() {
  if (device::kBulkCopies) device::ptx::mbarrier_arrive(&arrived);
}

__device__ __forceinline__ bool EarlyRows::is_placed(int at) const {
  return device::kBulkCopies && places[at] > 0;
}

__device__ __forceinline__ void EarlyRows::wait() {
  if (device::kBulkCopies) device::wait(&arrived, 0);
}

}  // namespace pariskv::cuda
