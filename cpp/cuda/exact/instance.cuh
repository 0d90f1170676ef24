/** The kernels of exact attention for one dtype: included where they are compiled. */
#pragma once

#include <algorithm>

#include "dispatch.h"
#include "exact/attend_exact.h"
#include "exact/exact_float.cuh"
#include "exact/exact_mma.cuh"

namespace pariskv::cuda {

template <typename Element, int kDim, bool kPadded>
ExactKernel exact_kernel_of() {
  using namespace device;
  if constexpr (sizeof(Element) == 4) {
    return {
        attend_exact_float<kDim, kPadded>, kFloatThreads, kFloatThreads / 32 * kFloatQueries<kDim>,
        int(sizeof(FloatTiles<kDim>)),     kDim,          false};
  } else {
    return {attend_exact_mma<Element, kDim, kPadded>,
            kMmaThreads,
            kMmaQueries<kDim>,
            kMmaBytes<kDim>,
            kDim,
            false};
  }
}

// Rows with K and V of equal length have kernels of their own, but for the longest. Other rows take
// the least of a few sizes that holds both.
using EvenDims = Sizes<64, 80, 96, 128, 192, 256>;
using PaddedDims = Sizes<128, 256, 512>;

template <typename Element>
ExactKernel exact_kernel(const RowFormat& rows) {
  if (rows.key_dim == rows.value_dim && contains(EvenDims{}, rows.key_dim)) {
    return dispatch(EvenDims{}, rows.key_dim, [](auto dim) {
      return exact_kernel_of<Element, int(decltype(dim)::kValue), false>();
    });
  }
  return dispatch(
      PaddedDims{}, least_of(PaddedDims{}, std::max(rows.key_dim, rows.value_dim)),
      [](auto dim) { return exact_kernel_of<Element, int(decltype(dim)::kValue), true>(); });
}

}  // namespace pariskv::cuda
