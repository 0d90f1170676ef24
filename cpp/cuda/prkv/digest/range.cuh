/** The least and the largest number of two neighbouring channels, as rows come; NaN where one is.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/stored_rows.cuh"

namespace pariskv::cuda {

template <typename Element>
using ChannelPair = typename device::RowReader<Element>::template Raw<2>;

/** Both channels go through an instruction together, where it has them: __half2, __nv_bfloat162. */
template <typename Element, typename Both>
class RangeOfBoth {
 public:
  using Pair = ChannelPair<Element>;

  __device__ __forceinline__ explicit RangeOfBoth(const Pair& first)
      : low_(both(first)), high_(low_) {}
  __device__ __forceinline__ void add(const Pair& pair) {
    low_ = __hmin2_nan(low_, both(pair));
    high_ = __hmax2_nan(high_, both(pair));
  }
  __device__ __forceinline__ float low(int channel) const { return number(low_, channel); }
  __device__ __forceinline__ float high(int channel) const { return number(high_, channel); }

 private:
  __device__ __forceinline__ static Both both(const Pair& pair) { return {pair.of[0], pair.of[1]}; }
  __device__ __forceinline__ static float number(const Both& both, int channel) {
    return device::to_float(channel == 0 ? both.x : both.y);
  }

  Both low_, high_;
};

template <typename Element>
class PairRange;
template <>
class PairRange<__half> : public RangeOfBoth<__half, __half2> {
  using RangeOfBoth::RangeOfBoth;
};
template <>
class PairRange<__nv_bfloat16> : public RangeOfBoth<__nv_bfloat16, __nv_bfloat162> {
  using RangeOfBoth::RangeOfBoth;
};
template <>
class PairRange<float> {
 public:
  using Pair = ChannelPair<float>;

  __device__ __forceinline__ explicit PairRange(const Pair& first) : low_(first), high_(first) {}
  __device__ __forceinline__ void add(const Pair& pair) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      low_.of[c] = device::ptx::min_nan(low_.of[c], pair.of[c]);
      high_.of[c] = device::ptx::max_nan(high_.of[c], pair.of[c]);
    }
  }
  __device__ __forceinline__ float low(int channel) const { return low_.of[channel]; }
  __device__ __forceinline__ float high(int channel) const { return high_.of[channel]; }

 private:
  Pair low_, high_;
};

}  // namespace pariskv::cuda
