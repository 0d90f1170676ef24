/**
 * The common part of the copies of a tail's rows (tail_copies.h), as attention uses it: queries
 * are multiplied by the units of keys and give each logit a shift, sums of values are put right at
 * the end.
 */
#pragma once

#include "device/attend_shape.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** Of one head, in device memory; null: there are no copies. */
struct CommonRows {
  const float* numbers;
  int key_dim, value_dim;

  __device__ __forceinline__ bool any() const { return numbers != nullptr; }
  __device__ __forceinline__ const float* key_centre() const { return numbers; }
  __device__ __forceinline__ const float* key_unit() const { return numbers + key_dim; }
  __device__ __forceinline__ const float* value_centre() const { return numbers + 2 * key_dim; }
  __device__ __forceinline__ const float* value_unit() const {
    return numbers + 2 * key_dim + value_dim;
  }

  /** Dimension d of a query, as it is multiplied with levels. Units are powers of two. */
  __device__ __forceinline__ float query(float x, int d) const {
    return __fmul_rn(x, key_unit()[d]);
  }
};

}  // namespace pariskv::cuda::device
