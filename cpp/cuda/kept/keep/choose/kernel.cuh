/**
 * choose_rows: how many rows a head keeps, which ones, and which further rows it holds: positions,
 * ages and counts of the block to be filled, and the number of each of its rows among the rows
 * to choose from. A block for each head.
 */
#pragma once

#include "device/signal.cuh"
#include "kept/keep/choose/select.cuh"
#include "kept/keep/item.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kNeighbours = 8;  // rows of a thread that are listed at a time
static_assert(kNeighbours * kChooseThreads < 1 << 16);

struct ChooseRows {
  const ChoiceItem& item;
  SelectSpace& space;
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
    const int64_t least = rows.least_of(wanted, [](int64_t x) { return x; }, sums, space);
    int above = 0;
    int64_t sum = 0;
    rows.each([&](int64_t x) { above += x > least, sum += x > least ? x : 0; });
    above = sums.of(above);
    const int64_t lacking = wanted - sums.of(sum);
    return int(min(int64_t(above) + (lacking + least - 1) / least, item.call.rules.most));
  }

  __device__ __forceinline__ void run(bool has_query) {
    int keep = int(item.job.rows != nullptr ? *item.job.rows : item.call.rules.most);
    if (has_query && item.call.rules.p != 1u << kTopPBits) keep = top_p_count();
    const uint64_t* ranks = item.ranks();
    const auto rows = row_numbers([=](int row) { return int64_t(ranks[row]); }, count);
    const Best best = best_of(rows, max(int64_t(keep), item.call.rules.least), sums, space);
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
  ChooseRows{item, space.select, {space.sums}, numbers.count, numbers.kept}.run(numbers.has_query !=
                                                                                0);
}

}  // namespace pariskv::cuda
