/**
 * The digest of a page by a block: as digest_page of the CPU, with the same roundings. A thread has
 * two neighbouring channels of all rows, so its sums are in the order of the rows.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "pariskv/sizes.h"
#include "prkv/blocks.cuh"
#include "prkv/digest/range.cuh"

namespace pariskv::cuda {

/** Threads of a block, for so many channels. */
constexpr int digest_threads(int key_dim) { return (key_dim / 2 + 31) / 32 * 32; }
constexpr int kMostDigestThreads = digest_threads(int(kMaxHeadDim));

struct PageSpace {
  uint32_t largest[kMostDigestThreads / 32];
  uint32_t broken[2];  // rows that are not finite, 32 in a word
};

/** The rows of a page, and what a block makes of them. */
template <typename Element, int kPage>
struct DigestPage {
  const char* first;  // key
  int row_bytes, dim;
  uint64_t live;  // rows that are looked at
  bool box;
  PageSpace& space;

  using Reader = device::RowReader<Element>;
  using Pair = ChannelPair<Element>;
  static constexpr uint64_t kAll = ~uint64_t{0} >> (64 - kPage);

  __device__ __forceinline__ bool has(int row) const { return (live >> row & 1) != 0; }

  /** Takes rows that are not finite out of `live`. Has barriers. */
  __device__ __forceinline__ void leave_out(uint64_t broken) {
    if (!__syncthreads_or(broken != 0)) return;
    if (threadIdx.x < 2) space.broken[threadIdx.x] = 0;
    __syncthreads();
    if (broken != 0) {
      atomicOr(&space.broken[0], uint32_t(broken));
      atomicOr(&space.broken[1], uint32_t(broken >> 32));
    }
    __syncthreads();
    live &= ~(uint64_t{space.broken[1]} << 32 | space.broken[0]);
  }

  /** The largest over all threads. Has a barrier. */
  __device__ __forceinline__ float most(float x) const {
    const uint32_t of_warp = __reduce_max_sync(~0u, device::bits_of(x));  // it is not negative
    if (device::lane_id() == 0) space.largest[device::warp_id()] = of_warp;
    __syncthreads();
    uint32_t most = of_warp;
#pragma unroll
    for (int warp = 0; warp < kMostDigestThreads / 32; ++warp) {
      if (warp < int(blockDim.x) / 32) most = max(most, space.largest[warp]);
    }
    return device::float_of(most);
  }

  /** The least float16 that is not below x, which is not negative. */
  __device__ __forceinline__ static uint16_t half_above(double x) {
    const __half half = __float2half_rn(float(x));
    return uint16_t(__half_as_ushort(half) + (double(__half2float(half)) < x));
  }

  /** The least and the largest number of a channel. */
  struct Range {
    float low, high;

    __device__ __forceinline__ bool finite() const {
      return device::finite(low) && device::finite(high);
    }
    __device__ __forceinline__ float length() const { return fmaxf(fabsf(low), fabsf(high)); }
  };

  /** Of all rows, of both channels; NaN where one is. */
  __device__ __forceinline__ static void range_of_all(const Pair (&keys)[kPage],
                                                      Range (&range)[2]) {
    PairRange<Element> both(keys[0]);
#pragma unroll
    for (int i = 1; i < kPage; ++i) both.add(keys[i]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      range[c] = {both.low(c), both.high(c)};
      const float first = device::to_float(keys[0].of[c]);
      if (range[c].low == range[c].high) range[c] = {first, first};  // of two zeros the earlier one
    }
  }
  /** Of those that are looked at. */
  __device__ __forceinline__ Range range_of_live(const Pair (&keys)[kPage], int channel) const {
    // Not fminf: of two zeros the earlier one stays.
    Range range{device::infinity(), -device::infinity()};
#pragma unroll
    for (int i = 0; i < kPage; ++i) {
      if (!has(i)) continue;
      const float x = device::to_float(keys[i].of[channel]);
      range.low = x < range.low ? x : range.low;
      range.high = x > range.high ? x : range.high;
    }
    return range;
  }

  /** Rows that are not finite in one of this thread's channels. */
  __device__ __forceinline__ static uint64_t broken_of(const Pair (&keys)[kPage]) {
    uint64_t broken = 0;
#pragma unroll
    for (int i = 0; i < kPage; ++i) {
      const bool whole = device::finite(device::to_float(keys[i].of[0])) &&
                         device::finite(device::to_float(keys[i].of[1]));
      broken |= uint64_t{!whole} << i;
    }
    return broken;
  }

  /** This thread's first channel: one that has none looks at the first of all. */
  __device__ __forceinline__ int own_channel() const {
    const int channel = 2 * int(threadIdx.x);
    return channel < dim ? channel : 0;
  }

  __device__ __forceinline__ void run(const device::PageNumbers& out) {
    // Nearly every page has all its rows, and all of them are finite.
    if (live == kAll && run_whole(out)) return;
    Pair keys[kPage];
    const char* from = first;
#pragma unroll
    for (int i = 0; i < kPage; ++i, from += row_bytes) {
      keys[i] = {};
      if (has(i)) keys[i] = Reader::template raw<2>(from, own_channel());
    }
    leave_out(broken_of(keys));
    if (live == 0) {
      if (threadIdx.x == 0) *out.live = 0, *out.unit = 0;
      return;
    }
    const Range range[2] = {range_of_live(keys, 0), range_of_live(keys, 1)};
    write<false>(keys, range, out);
  }

  /** Without a test for each row; false, and nothing was written, if some are not finite. */
  __device__ __forceinline__ bool run_whole(const device::PageNumbers& out) {
    Pair keys[kPage];
    const char* from = first;
#pragma unroll
    for (int i = 0; i < kPage; ++i, from += row_bytes) {
      keys[i] = Reader::template raw<2>(from, own_channel());
    }
    Range range[2];
    range_of_all(keys, range);
    if (__syncthreads_or(!range[0].finite() || !range[1].finite())) return false;
    write<true>(keys, range, out);
    return true;
  }

  /** @tparam kWhole  all rows are looked at */
  template <bool kWhole>
  __device__ __forceinline__ void write(const Pair (&keys)[kPage], const Range (&range)[2],
                                        const device::PageNumbers& out) {
    // The exponent that the largest number is brought to, and the least that it has: as on the CPU.
    constexpr int kTop = 14, kLeast = -100;
    const int channel = 2 * int(threadIdx.x);
    const bool own = channel < dim;
    const float largest = most(own ? fmaxf(range[0].length(), range[1].length()) : 0.0f);
    const int exponent = largest > 0 ? max(int(device::bits_of(largest) >> 23) - 127, kLeast) : 0;
    const float up = device::float_of(uint32_t(127 + kTop - exponent) << 23);
    if (threadIdx.x == 0) {
      *out.live = live;
      *out.unit = device::float_of(uint32_t(127 + exponent - kTop) << 23);
    }
    if (!own) return;

    uint32_t middles = 0, distances = 0;
    const auto count =
        kWhole ? float(kPage) : float(__popc(uint32_t(live)) + __popc(uint32_t(live >> 32)));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float low = range[c].low * up, high = range[c].high * up;
      const __half half = __float2half_rn(low * .5f + high * .5f);
      const float middle = __half2float(half);
      uint16_t distance = 0;
      if (box) {
        const double above = double(high) - middle, below = middle - double(low);
        distance = half_above(above > below ? above : below);
      } else {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kPage; ++i) {
          if (kWhole || has(i)) {
            // A product with a power of two is exact, or so small that the middle hides it.
            sum = sum + fabsf(__fmaf_rn(device::to_float(keys[i].of[c]), up, -middle));
          }
        }
        distance = __half_as_ushort(__float2half_rn(sum / count));
      }
      middles |= uint32_t(__half_as_ushort(half)) << 16 * c;
      distances |= uint32_t(distance) << 16 * c;
    }
    *reinterpret_cast<uint32_t*>(out.digest + channel) = middles;
    *reinterpret_cast<uint32_t*>(out.digest + dim + channel) = distances;
  }
};

}  // namespace pariskv::cuda
