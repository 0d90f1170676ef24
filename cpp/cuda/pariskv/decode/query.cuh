/**
 * A query, spread over a warp: element r of a lane is dimension 32 r + lane.
 */
#pragma once

#include <cstdint>

#include "device/numbers.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** The rows of q that one searcher stands for. */
template <typename Element>
struct QueryRows {
  const Element* first;
  int64_t stride;  // in elements
  int members;     // one, or the group for its mean
  bool mean;
  int head_dim;
};

/** x, zeros before, becomes the query of one searcher. All lanes of a warp. */
template <typename Element, int kWords>
__device__ __forceinline__ void load_query(const QueryRows<Element>& rows, float (&x)[kWords]) {
#pragma unroll 1
  for (int g = 0; g < rows.members; ++g) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const int d = 32 * r + lane_id();
      if (d < rows.head_dim) x[r] = __fadd_rn(x[r], to_float(rows.first[g * rows.stride + d]));
    }
  }
  if (!rows.mean) return;
#pragma unroll
  for (int r = 0; r < kWords; ++r) x[r] = __fdiv_rn(x[r], float(rows.members));
}

/**
 * x becomes H diag(s) x; false, and all zero, where that is not finite. All lanes of a warp.
 * @param negative  (kWords) sign bits: bit d % 32 of word d / 32 is that of dimension d
 */
template <int kWords>
__device__ __forceinline__ bool rotate(const uint32_t* negative, float (&x)[kWords]) {
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    if (negative[r] >> lane_id() & 1) x[r] = -x[r];
  }
#pragma unroll
  for (int half = 1; half < 32; half *= 2) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const float other = __shfl_xor_sync(~0u, x[r], half);
      x[r] = lane_id() & half ? __fsub_rn(other, x[r]) : __fadd_rn(x[r], other);
    }
  }
#pragma unroll
  for (int half = 1; half < kWords; half *= 2) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      if (r & half) continue;
      const float a = x[r], b = x[r + half];
      x[r] = __fadd_rn(a, b);
      x[r + half] = __fsub_rn(a, b);
    }
  }
  bool whole = true;
#pragma unroll
  for (int r = 0; r < kWords; ++r) whole = whole && finite(x[r]);
  whole = __all_sync(~0u, whole);
  if (!whole) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) x[r] = 0;
  }
  return whole;
}

}  // namespace pariskv::cuda::device
