/** The largest weight of a row and its neighbours, among the rows to choose from. */
#pragma once

#include <cstdint>

namespace pariskv::cuda {

__device__ __forceinline__ uint32_t pooled_weight(const int32_t* weights, int row, int count,
                                                  int reach) {
  int largest = 0;
  const int end = min(row + reach, count - 1);
#pragma unroll 4
  for (int j = max(row - reach, 0); j <= end; ++j) largest = max(largest, weights[j]);
  return uint32_t(largest);
}

}  // namespace pariskv::cuda
