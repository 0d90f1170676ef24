/**
 * choose_rows: how many rows a head keeps, which ones, and which of the others it holds: positions,
 * ages and counts of the block to be filled, and for each of its rows the number it had among those
 * to choose from. A block for each head. The k-th largest number is found eight bits at a time, and
 * the share of the largest ones two bits.
 */
#pragma once

#include "device/signal.cuh"
#include "device/warp.cuh"
#include "kept/keep/item.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kChooseThreads = 1024;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr int kOwnRows = 8;  // numbers of a thread that stay in registers; others are read anew

constexpr int kNeighbours = 8;
static_assert(kNeighbours * kChooseThreads < 1 << 16);

/** Sums that are taken together. */
constexpr int kSumsAtOnce = 3;

struct ChooseSpace {
  int64_t sums[2][kSumsAtOnce][kChooseWarps];  // by turns, so that one barrier is enough
  int counts[2][kSumsAtOnce][kChooseWarps];
  int bins[3][256];  // numbers by their next eight bits; by turns
};

/** Sums over all threads. Each has one barrier. */
struct BlockSums {
  ChooseSpace& space;
  int turn = 0;

  __device__ __forceinline__ void of(int64_t (&x)[kSumsAtOnce]) {
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      const int64_t sum = device::warp_sum(x[i]);
      if (device::lane_id() == 0) space.sums[turn][i][device::warp_id()] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      x[i] = device::warp_sum(space.sums[turn][i][device::lane_id()]);
    }
  }
  __device__ __forceinline__ void of(int (&x)[kSumsAtOnce]) {
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      const int sum = __reduce_add_sync(~0u, x[i]);
      if (device::lane_id() == 0) space.counts[turn][i][device::warp_id()] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      x[i] = __reduce_add_sync(~0u, space.counts[turn][i][device::lane_id()]);
    }
  }
  template <typename T>
  __device__ __forceinline__ T of(T x) {
    T all[kSumsAtOnce] = {x};
    of(all);
    return all[0];
  }
  __device__ __forceinline__ int most(int x) {
    turn ^= 1;
    const int of_warp = __reduce_max_sync(~0u, x);
    if (device::lane_id() == 0) space.counts[turn][0][device::warp_id()] = of_warp;
    __syncthreads();
    return __reduce_max_sync(~0u, space.counts[turn][0][device::lane_id()]);
  }
  /** The sum over all lower threads; `all` becomes that of all. */
  __device__ __forceinline__ int before(int x, int& all) {
    turn ^= 1;
    const int lower = device::lanes_before(x);
    if (device::lane_id() == 31) space.counts[turn][0][device::warp_id()] = lower + x;
    __syncthreads();
    const int of_warp = space.counts[turn][0][device::lane_id()];
    const int lower_warps = device::lanes_before(of_warp);
    all = __shfl_sync(~0u, lower_warps + of_warp, 31);
    return __shfl_sync(~0u, lower_warps, device::warp_id()) + lower;
  }
};
static_assert(kChooseWarps == 32, "a lane for each warp");

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
  /** Bits of the largest. */
  __device__ __forceinline__ int bits(BlockSums& sums) const {
    int most = 0;
    each([&](int64_t x) { most = max(most, 64 - __clzll(x)); });
    return sums.most(most);
  }
  /** The largest number such that value(x), summed over all x from there on, is `wanted`. */
  template <typename T, typename Value>
  __device__ __forceinline__ int64_t least_of(T wanted, Value value, BlockSums& sums) const {
    int64_t least = 0;
    for (int bit = (bits(sums) + 1) / 2 * 2 - 2; bit >= 0; bit -= 2) {
      T found[kSumsAtOnce] = {};
      each([&](int64_t x) {
#pragma unroll
        for (int i = 0; i < kSumsAtOnce; ++i) {
          if (x >= (least | int64_t{i + 1} << bit)) found[i] += value(x);
        }
      });
      sums.of(found);
      int digit = 0;
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) digit += found[i] >= wanted;
      least |= int64_t{digit} << bit;
    }
    return least;
  }
};

/** A digit of a k-th largest number. */
struct Digit {
  int digit;
  int above;  // numbers with larger ones
};

/** By every warp; `bins` need not have those of digit 0. There are `wanted` numbers or more. */
__device__ __forceinline__ Digit find_digit(const int (&bins)[256], int wanted) {
  constexpr int kOwn = 8;  // of a lane: higher lanes have lower ones
  const int top = 255 - kOwn * device::lane_id();
  int own[kOwn], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i] = bins[top - i];
  int above = device::lanes_before(sum), digit = -1;
  const int all = __shfl_sync(~0u, above + sum, 31);
  if (all < wanted) return {0, all};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (digit >= 0 || above >= wanted) continue;
    if (above + own[i] >= wanted) digit = top - i;
    if (digit < 0) above += own[i];
  }
  const int from = __ffs(int(__ballot_sync(~0u, digit >= 0))) - 1;
  return {__shfl_sync(~0u, digit, from), __shfl_sync(~0u, above, from)};
}

/**
 * The largest number such that `wanted` are from there on; there are as many. `above` becomes how
 * many are larger. After a barrier that follows the last such search.
 */
template <typename Number>
__device__ __forceinline__ int64_t kth_largest(const RowNumbers<Number>& rows, int wanted,
                                               BlockSums& sums, int& above) {
  auto& bins = sums.space.bins;
  if (threadIdx.x < 3 * 256) bins[threadIdx.x / 256][threadIdx.x % 256] = 0;
  int64_t least = 0;
  int turn = 0;
  above = 0;
  for (int shift = (rows.bits(sums) + 7) / 8 * 8 - 8; shift >= 0; shift -= 8) {
    // What was read two turns ago is read no more: there was a barrier since.
    if (threadIdx.x < 256) bins[(turn + 1) % 3][threadIdx.x] = 0;
    rows.each([&](int64_t x) {
      const int digit = int(x >> shift & 255);
      if (x >> shift >> 8 == least && digit != 0) atomicAdd(&bins[turn][digit], 1);
    });
    __syncthreads();
    const Digit found = find_digit(bins[turn], wanted - above);
    least = least << 8 | found.digit;
    above += found.above;
    turn = (turn + 1) % 3;
  }
  return least;
}

template <typename Number>
__device__ __forceinline__ RowNumbers<Number> row_numbers(Number number, int count) {
  return RowNumbers<Number>(number, count);
}

/** The largest of some numbers: of those that equal the least of them, the lower rows. */
struct Best {
  int keep;
  int64_t least;
  int ties;  // of those that equal it
};

/** The best `wanted`, or all that count. */
template <typename Number>
__device__ __forceinline__ Best best_of(const RowNumbers<Number>& rows, int64_t wanted,
                                        BlockSums& sums) {
  int candidates = 0;
  rows.each([&](int64_t) { ++candidates; });
  candidates = sums.of(candidates);
  const int keep = int(min(wanted, int64_t(candidates)));
  if (keep == candidates) return {keep, 0, candidates};
  if (keep == 0) return {0, INT64_MAX, 0};
  int above = 0;
  const int64_t least = kth_largest(rows, keep, sums, above);
  return {keep, least, keep - above};
}

struct ChooseRows {
  const ChoiceItem& item;
  BlockSums sums;
  int count, kept;

  /** How many of the largest shares make up p of all: as top_p_count of observe.h. */
  __device__ __forceinline__ int top_p_count() {
    const uint64_t* shares = item.shares();
    const auto rows = row_numbers([=](int row) { return int64_t(shares[row]); }, count);
    int64_t all = 0;
    rows.each([&](int64_t x) { all += x; });
    const uint64_t of_all = uint64_t(sums.of(all)) * item.call.rules.p;
    const auto wanted = int64_t((of_all + (uint64_t{1} << kTopPBits) - 1) >> kTopPBits);
    if (wanted == 0) return 0;
    const int64_t least = rows.least_of(wanted, [](int64_t x) { return x; }, sums);
    int above = 0;
    int64_t sum = 0;
    rows.each([&](int64_t x) { above += x > least, sum += x > least ? x : 0; });
    above = sums.of(above);
    const int64_t lacking = wanted - sums.of(sum);
    return int(min(int64_t(above) + (lacking + least - 1) / least, item.call.rules.most));
  }

  __device__ __forceinline__ void run(bool heard) {
    int keep = int(item.job.rows != nullptr ? *item.job.rows : item.call.rules.most);
    if (heard && item.call.rules.p != 1u << kTopPBits) keep = top_p_count();
    const uint64_t* ranks = item.ranks();
    const auto rows = row_numbers([=](int row) { return int64_t(ranks[row]); }, count);
    const Best best = best_of(rows, max(int64_t(keep), item.call.rules.least), sums);
    list(best.keep, best.least, best.ties);
  }

  /** Chosen rows and then held ones, each in order. A thread has some neighbours at a time. */
  __device__ __forceinline__ void list(int keep, int64_t least, int ties) {
    const device::KeptHead after = item.after();
    const int patience = int(item.call.rules.patience);
    int chosen_before = 0, held_before = 0;
    for (int first = 0; first < count; first += kNeighbours * kChooseThreads) {
      const int begin = first + int(threadIdx.x) * kNeighbours;
      int64_t own[kNeighbours];
      int tied = 0, all_tied = 0;
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k) {
        own[k] = begin + k < count ? int64_t(item.ranks()[begin + k]) : -1;
        tied += own[k] >= 0 && own[k] == least;
      }
      int earlier = sums.before(tied, all_tied);
      uint32_t chosen = 0, held = 0;  // a bit of each
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k) {
        const bool ties_in = own[k] == least && earlier++ < ties;
        const bool in = own[k] >= 0 && (own[k] > least || ties_in);
        const int age = own[k] >= 0 ? item.age(begin + k, kept) : kNewcomer;
        chosen |= uint32_t(in) << k;
        held |= uint32_t(!in && age != kNewcomer && age < patience) << k;
      }
      ties -= all_tied;
      // Two sums in one: there are fewer than 2^16 of each.
      int both = 0;
      const int at = sums.before(__popc(chosen) + (__popc(held) << 16), both);
      int to_chosen = chosen_before + (at & 0xffff), to_held = keep + held_before + (at >> 16);
      for (uint32_t left = chosen | held; left != 0; left &= left - 1) {
        const int k = __ffs(int(left)) - 1, row = begin + k;
        const bool in = (chosen >> k & 1) != 0;
        const int to = in ? to_chosen++ : to_held++;
        after.positions()[to] = item.position(row, kept);
        after.ages()[to] = in ? 0 : uint8_t(item.age(row, kept) + 1);
        item.picked()[to] = row;
      }
      chosen_before += both & 0xffff, held_before += both >> 16;
    }
    if (threadIdx.x != 0) return;
    after.counts()[0] = keep, after.counts()[1] = held_before;
  }
};

inline __global__ void __launch_bounds__(kChooseThreads)
    choose_rows(const __grid_constant__ ChoiceParams params) {
  __shared__ ChooseSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const ChoiceItem item(params, int(blockIdx.x));
  const ChosenHead numbers = *item.numbers();
  ChooseRows{item, {space}, numbers.count, numbers.kept}.run(numbers.heard != 0);
}

}  // namespace pariskv::cuda
