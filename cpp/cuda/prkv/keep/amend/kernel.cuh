/**
 * Pages that kept rows come from, without these: which ones, and which rows they are left with
 * (list_pages, a block for each head); then their digests (amend_pages, a block for each page).
 * Keys that were looked at are in scratch, so that they do not come over the bus again.
 */
#pragma once

#include "kept/keep/choose/sums.cuh"
#include "prkv/digest/page.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

/** Number of the first row of a page that a row was picked from; -1: not all of it is listed. */
__device__ __forceinline__ int first_of_page(const PRKVItem& item, int picked, int begin) {
  if (item.wanted == 0) return -1;
  const int32_t* listed = item.listed();
  const int first_row = max(begin, int(item.job.added));  // the sink may end in the page
  const int last_row = begin + int(item.rules.page) - 1;
  const int first = picked - (listed[picked] - first_row), last = first + last_row - first_row;
  const bool all = first >= 0 && last < item.numbers()->count && listed[first] == first_row &&
                   listed[last] == last_row;
  return all ? first - (first_row - begin) : -1;
}

inline __global__ void __launch_bounds__(kChooseThreads)
    list_pages(const __grid_constant__ PRKVChoiceParams params) {
  __shared__ SumSpace space;
  device::let_successor_start();
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.x));
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
    if (item.wanted > 0) item.whole()[at] = first_of_page(item, item.picked()[i], begin);
  }
  if (threadIdx.x == 0) *amended.count() = pages;
}

template <typename Element, int kPage>
__global__ void __launch_bounds__(kMostDigestThreads)
    amend_pages(const __grid_constant__ PRKVChoiceParams params) {
  __shared__ PageSpace space;
  device::wait_for_predecessor();
  const PRKVItem item(params, int(blockIdx.y));
  const device::AmendedHead amended = item.amended();
  const int i = int(blockIdx.x);
  if (i >= int(*amended.count())) return;
  const device::PageNumbers out = amended.page(i);
  const uint64_t live = *out.live;
  const int whole = item.wanted > 0 ? item.whole()[i] : -1;
  const RowFormat& rows = item.call.shape.rows;
  DigestPage<Element, kPage>{
      whole >= 0 ? item.copy(whole) : item.stored(int(amended.numbers()[i]) * kPage),
      int(whole >= 0 ? rows.key_bytes() : rows.bytes()),
      int(item.call.shape.rows.key_dim),
      live,
      item.rules.box,
      space}
      .run(out);
}

}  // namespace pariskv::cuda
