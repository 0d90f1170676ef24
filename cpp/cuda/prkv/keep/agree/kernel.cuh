/**
 * How far the first and the last query of each query head agree on the best rows: their logits
 * (compare_queries), then how many rows are among the best of both (count_agreed).
 */
#pragma once

#include "kept/keep/choose/kernel.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

/** A thread: a row, and every other one of the queries. */
template <int kChunks>
__global__ void __launch_bounds__(kLookThreads)
    compare_queries(const __grid_constant__ PRKVChoiceParams params) {
  extern __shared__ __align__(16) unsigned char tile_shared[];
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int count = item.numbers()->count, first = int(blockIdx.x) * kLookRows;
  if (first >= count) return;
  const KeyTile<kChunks> tile = load_tile<kChunks>(item, tile_shared, first, count);
  const int row = int(threadIdx.x) % kLookRows, group = int(item.call.shape.group);
  if (row >= tile.rows) return;
  const auto* key = reinterpret_cast<const uint4*>(tile.key(row));
  for (int i = int(threadIdx.x) / kLookRows; i < 2 * group; i += kLookThreads / kLookRows) {
    const int g = i / 2, asked = item.end(g, i % 2);
    if (asked < 0) continue;
    const auto* query = reinterpret_cast<const uint4*>(
        device::recent_place(item.call.shape.recent_queries(), const_cast<char*>(item.job.recent),
                             item.job.asked.begin + asked, item.head * group + g)
            .numbers);
    int dot = 0;
    for (int at = 0; at < tile.dim() / 16; ++at) {
      const uint4 a = key[at], b = query[at];
      dot = __dp4a(int(a.x), int(b.x), dot);
      dot = __dp4a(int(a.y), int(b.y), dot);
      dot = __dp4a(int(a.z), int(b.z), dot);
      dot = __dp4a(int(a.w), int(b.w), dot);
    }
    const QueryHead query_head = item.query_heads()[asked * group + g];
    const int logit = logit_of(query_head, logit_part(query_head, dot, tile.steps[row]));
    const bool seen = sees(query_head, item.position(first + row, 0), tile.steps[row]);
    item.compared(g, i % 2)[first + row] = seen ? logit : kNoLogit;
  }
}

/** A logit as a number that is not negative; negative: the row is not seen. */
__device__ __forceinline__ int64_t number_of_logit(int logit) {
  return logit == kNoLogit ? -1 : int64_t{logit} + 4 * int64_t(kMostSteps);
}

inline __global__ void __launch_bounds__(kChooseThreads)
    count_agreed(const __grid_constant__ PRKVChoiceParams params) {
  __shared__ ChooseSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const int g = int(blockIdx.x), count = item.numbers()->count;
  if (item.end(g, 0) < 0) {
    if (threadIdx.x == 0) item.agreed()[g] = -1;
    return;
  }
  BlockSums sums{space.sums};
  Best best[2];
  for (int which = 0; which < 2; ++which) {
    const int32_t* logits = item.compared(g, which);
    const auto rows = row_numbers([=](int row) { return number_of_logit(logits[row]); }, count);
    best[which] = best_of(rows, item.rules.budget, sums, space.select);
  }
  int agreed = 0;
  for (int first = 0; first < count; first += kNeighbours * kChooseThreads) {
    const int begin = first + int(threadIdx.x) * kNeighbours;
    uint32_t both = ~0u;  // a bit of each of the neighbours
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      int64_t own[kNeighbours];
      int tied = 0, all_tied = 0;
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k) {
        const bool there = begin + k < count;
        own[k] = there ? number_of_logit(item.compared(g, which)[begin + k]) : -1;
        tied += own[k] >= 0 && own[k] == best[which].least;
      }
      int earlier = sums.before(tied, all_tied);
      uint32_t in = 0;
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k) {
        const bool ties_in = own[k] == best[which].least && earlier++ < best[which].ties;
        in |= uint32_t(own[k] >= 0 && (own[k] > best[which].least || ties_in)) << k;
      }
      best[which].ties -= all_tied;
      both &= in;
    }
    agreed += __popc(both);
  }
  agreed = sums.of(agreed);
  if (threadIdx.x == 0) item.agreed()[g] = agreed;
}

}  // namespace pariskv::cuda
