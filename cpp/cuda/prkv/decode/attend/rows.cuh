/**
 * The live rows of the pages that were found, in parts: a block lists the rows of its parts, and
 * asks the row cache for them.
 */
#pragma once

#include "device/row_cache.cuh"
#include "device/stored_rows.cuh"
#include "head_row_cache.cuh"
#include "prkv/decode/context.cuh"

namespace pariskv::cuda {

static_assert(sizeof(device::SelectedRow) == PageScratchLayout::kRowBytes);

/** Rows that are listed in shared memory, where a block attends to no more. */
constexpr int kListedPageRows = 512;

/** Of a block, in shared memory. */
struct PageRowSpace {
  struct Entry {
    FoundPage page;
    int offset;  // of its first live row among all
  };

  device::RowCache cache;
  device::SelectedRow list[kListedPageRows];
  Entry entries[device::kThreads];
  int count;  // of entries
  int sums[device::kWarps];
};

/** As EvenParts, of the rows from a block's first one on. */
struct PageParts {
  int rows, first;

  __device__ __forceinline__ int begin(int part) const {
    return device::part_begin(rows, part) - first;
  }
  __device__ __forceinline__ int most() const { return device::EvenParts{rows}.most(); }
};

/** Where a block's rows lie. */
template <typename Element>
struct PageRows {
  using Reader = device::RowReader<Element>;
  static constexpr bool kCounted = false;
  static constexpr device::RowsLess kLess = device::RowsLess::kNothing;

  const device::SelectedRow* rows;

  __device__ __forceinline__ const char* operator()(int i) const {
    return reinterpret_cast<const char*>(rows[i].address);
  }
  __device__ __forceinline__ float noted(int, int, float logit) const { return logit; }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

/** The rows of a block: an object of each thread, for all threads. */
class PageRowList {
 public:
  __device__ __forceinline__ PageRowList(const PageAttendParams& params, const PageContext& context,
                                         const PageScratch& scratch, const device::Cluster& cluster,
                                         PageRowSpace& space)
      : params_(params), context_(context), scratch_(scratch), cluster_(cluster), space_(space) {}

  /** Of `found` pages. All threads; ends with a barrier. */
  __device__ __forceinline__ void list(int found) {
    const FoundPage mine = page_at(int(threadIdx.x), found);  // most often all there are
    rows_ = count_rows(found, mine);
    begin_ = device::part_begin(rows_, cluster_.first_part());
    end_ = device::part_begin(rows_, cluster_.end_part());
    list_ = end_ - begin_ <= kListedPageRows ? space_.list : scratch_.rows + begin_;
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < found && before < end_; base += device::kThreads) {
      const FoundPage page = base == 0 ? mine : page_at(base + int(threadIdx.x), found);
      if (threadIdx.x == 0) space_.count = 0;
      const int own = rows_of(page.live);
      int all;
      const int offset = before + before_in_block(own, all);
      before += all;
      if (own > 0 && offset < end_ && offset + own > begin_) {
        space_.entries[atomicAdd(&space_.count, 1)] = {page, offset};
      }
      __syncthreads();
      list_entries();
      __syncthreads();
    }
  }

  __device__ __forceinline__ PageParts parts() const { return {rows_, begin_}; }
  __device__ __forceinline__ device::SelectedRow* rows() const { return list_; }
  /** All results of RowCache::stamp of this thread: see CacheRows. */
  __device__ __forceinline__ uint32_t stamped() const { return stamped_; }

 private:
  static __device__ __forceinline__ int rows_of(uint64_t live) {
    return __popc(uint32_t(live)) + __popc(uint32_t(live >> 32));
  }
  __device__ __forceinline__ FoundPage page_at(int i, int found) const {
    if (i >= found) return {0, 0};
    const auto* from = reinterpret_cast<const ulonglong2*>(scratch_.found + i);
    const ulonglong2 page = __ldcg(from);
    return {page.x, int64_t(page.y)};
  }

  /** The sum over all lower threads, and that over all. Begins and ends apart from other calls by
   * a barrier each. */
  __device__ __forceinline__ int before_in_block(int own, int& all) const {
    const int before = device::lanes_before(own);
    if (device::lane_id() == 31) space_.sums[device::warp_id()] = before + own;
    __syncthreads();
    const int lane = device::lane_id();
    const int sum = lane < device::kWarps ? space_.sums[lane] : 0;
    all = __reduce_add_sync(~0u, sum);
    return before + __reduce_add_sync(~0u, lane < device::warp_id() ? sum : 0);
  }

  __device__ __forceinline__ int count_rows(int found, const FoundPage& mine) const {
    int own = rows_of(mine.live), all;
    for (int i = int(threadIdx.x) + device::kThreads; i < found; i += device::kThreads) {
      own += rows_of(page_at(i, found).live);
    }
    before_in_block(own, all);
    __syncthreads();
    return all;
  }

  /** A warp for each page, a lane for each row. */
  __device__ __forceinline__ void list_entries() {
    const int size = int(params_.call.rules.page);
#pragma unroll 1
    for (int e = device::warp_id(); e < space_.count; e += device::kWarps) {
      const PageRowSpace::Entry entry = space_.entries[e];
      const int first = (context_.first_page + int(entry.page.page)) * size;
      const char* rows =
          device::row_of(context_.rows, params_.by_segment, int(params_.call.shape.segment_tokens),
                         context_.head, first, context_.shape.row_bytes);
#pragma unroll 1
      for (int i = device::lane_id(); i < size; i += 32) {
        const int at = entry.offset + rows_of(entry.page.live & ((uint64_t{1} << i) - 1));
        if ((entry.page.live >> i & 1) == 0 || at < begin_ || at >= end_) continue;
        list_[at - begin_] = row_of(first + i, rows + int64_t(i) * context_.shape.row_bytes);
      }
    }
  }

  /** Where a row is to come from: the cache may have it, or is to have it. */
  __device__ __forceinline__ device::SelectedRow row_of(int position, const char* stored) {
    const device::RowCache& cache = space_.cache;
    const int slot = cache.find(cache.tags_at(position), position);
    if (slot < 0) return {reinterpret_cast<uint64_t>(stored), position, 0};
    stamped_ |= cache.stamp(slot);
    return {reinterpret_cast<uint64_t>(cache.row(slot)), device::CacheRows::kFound, 0};
  }

  const PageAttendParams& params_;
  const PageContext& context_;
  const PageScratch& scratch_;
  const device::Cluster& cluster_;
  PageRowSpace& space_;
  device::SelectedRow* list_ = nullptr;
  int rows_ = 0, begin_ = 0, end_ = 0;
  uint32_t stamped_ = 0;
};

}  // namespace pariskv::cuda
