/** list_zone: as list_rows, of all of a zone; and where the tallies of queries begin. */
#pragma once

#include "kept/keep/list/kernel.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

template <typename Element>
__global__ void __launch_bounds__(kListThreads)
    list_zone(const __grid_constant__ PrkvChoiceParams params) {
  __shared__ ListSpace space;
  device::let_successor_start();
  const PrkvItem item(params, int(blockIdx.x));
  ListRows<Element>{item, space}.run();
  for (int q = int(threadIdx.x); q < item.queries(); q += kListThreads) {
    item.tallies()[q] = {0, kNoLogit};
  }
  if (!params.compares) return;
  __syncthreads();  // voices are written
  const int group = int(item.call.shape.group);
  for (int g = int(threadIdx.x); g < group; g += kListThreads) {
    int first = -1, last = -1;
    for (int asked = 0; asked < item.positions_asked(); ++asked) {
      if (item.voices()[asked * group + g].counts == 0) continue;
      first = first < 0 ? asked : first;
      last = asked;
    }
    item.end(g, 0) = first, item.end(g, 1) = last;
  }
}

}  // namespace pariskv::cuda
