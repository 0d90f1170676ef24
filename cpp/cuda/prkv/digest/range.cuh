/** The least and the largest number of two neighbouring channels, as rows come; NaN where one is.
 */
#pragma once

#include <type_traits>

#include "device/numbers.cuh"
#include "device/ptx.cuh"

namespace pariskv::cuda {

template <typename Element>
struct alignas(2 * sizeof(Element)) ChannelPair {
  Element of[2];
};

/** Numbers of 16 bits go in pairs through an instruction. */
template <typename Element>
class PairRange {
 public:
  using Pair = ChannelPair<Element>;

  __device__ __forceinline__ explicit PairRange(const Pair& first)
      : low_(word(first)), high_(low_) {}
  __device__ __forceinline__ void add(const Pair& pair) {
    if constexpr (std::is_same_v<Element, __half>) {
      low_ = device::ptx::min_nan_f16x2(low_, word(pair));
      high_ = device::ptx::max_nan_f16x2(high_, word(pair));
    } else {
      low_ = device::ptx::min_nan_bf16x2(low_, word(pair));
      high_ = device::ptx::max_nan_bf16x2(high_, word(pair));
    }
  }
  __device__ __forceinline__ float low(int channel) const { return number(low_, channel); }
  __device__ __forceinline__ float high(int channel) const { return number(high_, channel); }

 private:
  __device__ __forceinline__ static uint32_t word(const Pair& pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ __forceinline__ static float number(uint32_t word, int channel) {
    return device::to_float(reinterpret_cast<const Pair&>(word).of[channel]);
  }

  uint32_t low_, high_;
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
