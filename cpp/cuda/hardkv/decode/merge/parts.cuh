/** Parts of the attention of a query head, put together by a warp that has 32 dimensions. */
#pragma once

#include "device/softmax.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda {

/** Parts of one kind: a lane has maxima and sums of some, and a dimension of all. */
template <int kMost>
struct PartsOfLane {
  static constexpr int kTurns = (kMost + 31) / 32;  // parts whose maximum a lane has
  float maximum[kTurns], sums[kTurns];
  float values[kMost];

  /**
   * @param parts  the first of `count`, `step` floats apart
   * @param d      this lane's dimension, if it `exists`
   */
  __device__ __forceinline__ PartsOfLane(const float* parts, int count, int step, int d,
                                         bool exists) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int part = 32 * i + device::lane_id();
      maximum[i] = part < count ? __ldcg(parts + part * step) : -device::infinity();
      sums[i] = part < count ? __ldcg(parts + part * step + 1) : 0.0f;
    }
#pragma unroll
    for (int part = 0; part < kMost; ++part) {
      values[part] = part < count && exists ? __ldcg(parts + part * step + 2 + d) : 0.0f;
    }
  }

  /** Nothing was seen. */
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) maximum[i] = -device::infinity(), sums[i] = 0;
#pragma unroll
    for (float& value : values) value = 0;
  }
  /** Of this lane's parts. */
  __device__ __forceinline__ float top() const {
    float top = maximum[0];
#pragma unroll
    for (int i = 1; i < kTurns; ++i) top = fmaxf(top, maximum[i]);
    return top;
  }
  /** This lane's parts in units of e^top: `sum` is added to. */
  __device__ __forceinline__ void add_sums(float top, float& sum) const {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) sum = __fmaf_rn(sums[i], factor(i, top), sum);
  }
  /** All parts of this lane's dimension. */
  __device__ __forceinline__ void add_values(float top, float& weighted) const {
    float factors[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) factors[i] = factor(i, top);
#pragma unroll
    for (int part = 0; part < kMost; ++part) {
      weighted = __fmaf_rn(__shfl_sync(~0u, factors[part / 32], part % 32), values[part], weighted);
    }
  }

 private:
  __device__ __forceinline__ float factor(int i, float top) const {
    return device::factor_of(maximum[i], top);
  }
};

}  // namespace pariskv::cuda
