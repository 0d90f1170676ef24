/**
 * Pages that kept rows come from, without these: which ones, and which rows they are left with
 * (list_pages, a block for each head); then their digests (amend_pages, a block for each page).
 */
#pragma once

#include "kept/keep/choose/kernel.cuh"
#include "prkv/digest/page.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

inline __global__ void __launch_bounds__(kChooseThreads)
    list_pages(const __grid_constant__ PrkvChoiceParams params) {
  __shared__ ChooseSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PrkvItem item(params, int(blockIdx.x));
  const device::AmendedHead amended = item.amended();
  const int32_t* positions = item.after().positions();
  const int rows = item.after().counts()[0], size = int(item.rules.page);
  BlockSums sums{space};
  int pages = 0;
  for (int first = 0; first < rows; first += kChooseThreads) {
    const int i = first + int(threadIdx.x);
    const int page = i < rows ? positions[i] / size : -1;
    const bool opens = page >= 0 && (i == 0 || positions[i - 1] / size != page);
    int all = 0;
    const int at = pages + sums.before(int(opens), all);
    pages += all;
    if (!opens) continue;
    const int begin = page * size;
    uint64_t live = *item.whole_page(page).live;
    for (int j = i; j < rows && positions[j] / size == page; ++j) {
      live &= ~(uint64_t{1} << (positions[j] - begin));
    }
    amended.numbers()[at] = page;
    *amended.page(at).live = live;
  }
  if (threadIdx.x == 0) *amended.count() = pages;
}

template <typename Element, int kPage>
__global__ void __launch_bounds__(kMostDigestThreads)
    amend_pages(const __grid_constant__ PrkvChoiceParams params) {
  __shared__ PageSpace space;
  device::wait_for_predecessor();
  const PrkvItem item(params, int(blockIdx.y));
  const device::AmendedHead amended = item.amended();
  const int i = int(blockIdx.x);
  if (i >= int(*amended.count())) return;
  const device::PageNumbers out = amended.page(i);
  const uint64_t live = *out.live;
  DigestPage<Element, kPage>{item.stored(int(amended.numbers()[i]) * kPage),
                             int(item.call.shape.rows.bytes()),
                             int(item.call.shape.rows.key_dim),
                             live,
                             item.rules.box,
                             space}
      .run(out);
}

}  // namespace pariskv::cuda
