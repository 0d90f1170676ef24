/**
 * list_zone: as list_rows, of all of a zone; how the budget is split, where it is known; and where
 * the tallies of queries begin.
 */
#pragma once

#include "kept/keep/list/kernel.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

template <typename Element>
__global__ void __launch_bounds__(kListThreads)
    list_zone(const __grid_constant__ PRKVChoiceParams params) {
  __shared__ ListSpace space;
  device::let_successor_start();
  const PRKVItem item(params, int(blockIdx.x));
  const ListRows<Element> list{item, space};
  if (blockIdx.y > 0) return list.pack(int(blockIdx.y) - 1);
  const int tokens = int(item.job.zone_end - item.job.added);
  list.run(tokens, 0, [&](int row) { return item.stored(int(item.job.added) + row); });
  for (int q = int(threadIdx.x); q < int(padded_queries(item.queries())); q += kListThreads) {
    item.tallies()[q] = {0, kNoLogit};
  }
  if (!params.compares) {
    if (item.head != 0 || threadIdx.x != 0) return;
    const PRKVSplit* before = params.before[params.choice.by_heads(int(blockIdx.x))];
    *item.amended().split() =
        before != nullptr ? *before : item.rules.split(item.rules.static_pages);
    return;
  }
  __syncthreads();  // query heads are written
  const int group = int(item.call.shape.group);
  for (int g = int(threadIdx.x); g < group; g += kListThreads) {
    int first = -1, last = -1;
    for (int asked = 0; asked < item.positions_asked(); ++asked) {
      if (item.query_heads()[asked * group + g].visible_end == 0) continue;
      first = first < 0 ? asked : first;
      last = asked;
    }
    item.end(g, 0) = first, item.end(g, 1) = last;
  }
}

}  // namespace pariskv::cuda
