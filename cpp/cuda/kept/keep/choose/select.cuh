/**
 * The k-th largest of many numbers, or the one with which the sum of the largest reaches so much.
 * Numbers are counted in bins, 32 to an octave, and if many lie in the bin in question, in bins of
 * it; the few that are left are compared with one another.
 */
#pragma once

#include "kept/keep/choose/sums.cuh"

namespace pariskv::cuda {

constexpr int kOwnRows = 8;  // numbers of a thread that stay in registers; the rest is read anew

constexpr int kBinsOfThread = 2;
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
static_assert(kBins == kBinsOfThread * kChooseThreads);
constexpr int kNotedAtMost = 256;

/** Numbers that are cut into bins: all that are not 0, then 2^bits of them from `begin` on. */
struct BinRange {
  int64_t begin;  // 0: all
  int bits;

  __device__ __forceinline__ bool has(int64_t x) const {
    return begin == 0 ? x > 0 : x >= begin && (x - begin) >> bits == 0;
  }
  /** Of all: a bin for each number below 64, then 32 to an octave, up to 2^63. */
  __device__ __forceinline__ int bin_of(int64_t x) const {
    if (begin != 0) return int((x - begin) >> step());
    const int open = max(58 - __clzll(x), 0);
    return 32 * open + int(x >> open);
  }
  __device__ __forceinline__ BinRange of(int bin) const {
    if (begin != 0) return {begin + (int64_t{bin} << step()), step()};
    const int open = max(bin / 32 - 1, 0);
    return {int64_t{bin - 32 * open} << open, open};
  }

 private:
  __device__ __forceinline__ int step() const { return max(bits - kBinBits, 0); }
};

struct SelectSpace {
  uint32_t low[kBins], high[kBins];  // of the sum of a bin
  int64_t numbers[kNotedAtMost];     // of the bin in question
  int64_t above, least;
  int bin, noted;

  __device__ __forceinline__ void clear() {
    for (int i = int(threadIdx.x); i < kBins; i += kChooseThreads) low[i] = high[i] = 0;
    if (threadIdx.x == 0) bin = -1, noted = 0;
  }
  /** 64 bits by two words, which shared memory can add. */
  __device__ __forceinline__ void add(int to, uint64_t x) {
    const auto own = uint32_t(x);
    const uint32_t before = atomicAdd(&low[to], own);
    const uint32_t carried = uint32_t(x >> 32) + uint32_t(before + own < before);
    if (carried != 0) atomicAdd(&high[to], carried);
  }
  /** The bin with which the sum of all from there on, and of `before`, reaches `wanted`. */
  __device__ __forceinline__ void find(int64_t wanted, int64_t before, BlockSums& sums) {
    const int mine = kBins - 1 - kBinsOfThread * int(threadIdx.x);
    int64_t own[kBinsOfThread], all = 0;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      all += own[i] = int64_t(uint64_t{high[mine - i]} << 32 | low[mine - i]);
    }
    before += sums.before(all);
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (before < wanted && before + own[i] >= wanted) bin = mine - i, above = before;
      before += own[i];
    }
  }
  __device__ __forceinline__ void note(int64_t x) {
    const int at = atomicAdd(&noted, 1);
    if (at < kNotedAtMost) numbers[at] = x;
  }
};

struct ChooseSpace {
  SumSpace sums;
  SelectSpace select;
};

/** One number for each row, negative where it does not count, by all threads. */
template <typename Number>
struct RowNumbers {
  Number number;  // number(row)
  int count;
  int64_t own[kOwnRows];

  __device__ __forceinline__ RowNumbers(Number number_of, int rows)
      : number(number_of), count(rows) {
#pragma unroll
    for (int k = 0; k < kOwnRows; ++k) {
      const int row = int(threadIdx.x) + k * kChooseThreads;
      own[k] = row < count ? number(row) : -1;
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int k = 0; k < kOwnRows; ++k) {
      if (own[k] >= 0) visit(own[k]);
    }
#pragma unroll 4
    for (int row = int(threadIdx.x) + kOwnRows * kChooseThreads; row < count;
         row += kChooseThreads) {
      const int64_t x = number(row);
      if (x >= 0) visit(x);
    }
  }
  /** The largest number such that value(x), summed over all x from there on, is `wanted`. */
  template <typename T, typename Value>
  __device__ __forceinline__ int64_t least_of(T wanted, Value value, BlockSums& sums,
                                              SelectSpace& space) const {
    // All x above a bin are known by a sum, so all else is a matter of one bin.
    BinRange range{};
    int64_t above = 0;
    while (true) {
      space.clear();
      __syncthreads();
      each([&](int64_t x) {
        if (range.has(x)) space.add(range.bin_of(x), uint64_t(value(x)));
      });
      __syncthreads();
      space.find(wanted, above, sums);
      __syncthreads();
      if (space.bin < 0) return 0;  // zeros make up what is lacking
      range = range.of(space.bin);
      above = space.above;
      if (range.bits == 0) return range.begin;
      each([&](int64_t x) {
        if (range.has(x)) space.note(x);
      });
      __syncthreads();
      if (space.noted <= kNotedAtMost) break;
      __syncthreads();  // all have seen it
    }
    if (int(threadIdx.x) < space.noted) {
      const int64_t x = space.numbers[threadIdx.x];
      int64_t larger = above, equal = 0;
      bool first = true;
      for (int i = 0; i < space.noted; ++i) {
        const int64_t other = space.numbers[i];
        larger += other > x ? int64_t(value(other)) : 0;
        equal += other == x ? int64_t(value(other)) : 0;
        first = first && (other != x || i >= int(threadIdx.x));
      }
      if (first && larger < wanted && larger + equal >= wanted) space.least = x;
    }
    __syncthreads();
    return space.least;
  }
};

template <typename Number>
__device__ __forceinline__ RowNumbers<Number> row_numbers(Number number, int count) {
  return RowNumbers<Number>(number, count);
}

/** The largest of some numbers: of rows equal to the least of them, the lower ones. */
struct Best {
  int keep;
  int64_t least;
  int ties;  // of rows equal to it
};

/** The best `wanted`, or all that count. */
template <typename Number>
__device__ __forceinline__ Best best_of(const RowNumbers<Number>& rows, int64_t wanted,
                                        BlockSums& sums, SelectSpace& space) {
  int candidates = 0;
  rows.each([&](int64_t) { ++candidates; });
  candidates = sums.of(candidates);
  const int keep = int(min(wanted, int64_t(candidates)));
  if (keep == candidates) return {keep, 0, candidates};
  if (keep == 0) return {0, INT64_MAX, 0};
  const int64_t least = rows.least_of(keep, [](int64_t) { return 1; }, sums, space);
  int above = 0;
  rows.each([&](int64_t x) { above += x > least; });
  return {keep, least, keep - sums.of(above)};
}

}  // namespace pariskv::cuda
