/**
 * list_looked_at: the rows that a refresh looks at, ascending: rows of the best pages, rows that
 * were kept before, and the latest ones. A block for each head.
 */
#pragma once

#include "device/signal.cuh"
#include "kept/keep/choose/select.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

__device__ __forceinline__ int bits_set(uint64_t x) {
  return __popc(uint32_t(x)) + __popc(uint32_t(x >> 32));
}

struct ListLookedAt {
  const PRKVItem& item;
  SelectSpace& space;
  BlockSums sums;

  /** Rows of a page that were kept before, and the number of the first of them. */
  __device__ __forceinline__ uint64_t kept_before(int begin, int& first) const {
    const device::KeptHead before = item.before();
    const int32_t* positions = before.positions();
    const int count = before.counts()[0], size = int(item.rules.page);
    first = smaller_than(positions, count, begin);
    uint64_t rows = 0;
    for (int i = first; i < count && positions[i] < begin + size; ++i) {
      rows |= uint64_t{1} << (positions[i] - begin);
    }
    return rows;
  }

  /** The first bits of a page, up to one. */
  static __device__ __forceinline__ uint64_t bits_before(int end) {
    return end >= 64 ? ~uint64_t{0} : (uint64_t{1} << max(end, 0)) - 1;
  }

  /** The rows of a warp's pages, page by page, a lane for every 32nd row of one. */
  __device__ __forceinline__ void write(int to, int begin, uint64_t rows, uint64_t kept,
                                        int first_kept) const {
#pragma unroll 1
    for (unsigned left = __ballot_sync(~0u, rows != 0); left != 0; left &= left - 1) {
      const int from = __ffs(int(left)) - 1;
      const uint64_t own = __shfl_sync(~0u, rows, from), own_kept = __shfl_sync(~0u, kept, from);
      const int own_to = __shfl_sync(~0u, to, from), own_begin = __shfl_sync(~0u, begin, from);
      const int own_first = __shfl_sync(~0u, first_kept, from);
      for (int bit = device::lane_id(); bit < int(item.rules.page); bit += 32) {
        if ((own >> bit & 1) == 0) continue;
        const uint64_t below = (uint64_t{1} << bit) - 1;
        const int at = own_to + bits_set(own & below);
        item.listed()[at] = own_begin + bit;
        item.sources()[at] =
            (own_kept >> bit & 1) != 0 ? own_first + bits_set(own_kept & below) : -1;
      }
    }
  }

  __device__ __forceinline__ void run() {
    const ZonePages zone = item.pages();
    const int pages = int(zone.count), size = int(item.rules.page);
    const int zone_begin = int(item.job.added), zone_end = int(item.job.zone_end);
    const int latest = zone_end - int(PRKVRules::kLatestLookedAt);
    const uint64_t* ranks = item.ranks();
    const auto numbers = row_numbers([=](int page) { return int64_t(ranks[page]); }, pages);
    Best best = best_of(numbers, item.wanted, sums, space);
    int count = 0;
    for (int first = 0; first < pages; first += kChooseThreads) {
      const int page = first + int(threadIdx.x), begin = (int(zone.first) + page) * size;
      const int64_t own = page < pages ? int64_t(ranks[page]) : -1;
      int tied = 0, all = 0, first_kept = 0;
      const int earlier = sums.before(int(own >= 0 && own == best.least), tied);
      const bool chosen =
          own >= 0 && (own > best.least || (own == best.least && earlier < best.ties));
      best.ties -= tied;
      uint64_t rows = 0, kept = 0;
      if (page < pages) {
        kept = kept_before(begin, first_kept);
        rows = chosen ? ~uint64_t{0} : kept | ~bits_before(latest - begin);
        rows &= bits_before(min(zone_end - begin, size)) & ~bits_before(zone_begin - begin);
      }
      const int to = count + sums.before(bits_set(rows), all);
      count += all;
      write(to, begin, rows, kept, first_kept);
    }
    if (threadIdx.x == 0) item.numbers()->count = count;
    for (int q = int(threadIdx.x); q < int(padded_queries(item.queries())); q += kChooseThreads) {
      item.tallies()[q] = {0, kNoLogit};
    }
  }
};

inline __global__ void __launch_bounds__(kChooseThreads)
    list_looked_at(const __grid_constant__ PRKVChoiceParams params) {
  __shared__ ChooseSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.x));
  ListLookedAt{item, space.select, {space.sums}}.run();
}

}  // namespace pariskv::cuda
