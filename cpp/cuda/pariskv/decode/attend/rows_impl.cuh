/** Definitions of rows.cuh. */
#pragma once

#include "device/copy.cuh"
#include "pariskv/decode/attend/rows.cuh"
#include "pariskv/decode/row_address.cuh"

namespace pariskv::cuda {

template <typename Element>
__device__ __forceinline__ device::RowCache row_cache_of(const DecodeCall& call,
                                                         const SequenceView& view, int head) {
  const ModelShape& shape = call.shape;
  if (view.row_cache == nullptr || call.explains) return {};
  const int64_t slots = shape.cached_rows, first = head * slots;
  const int64_t row_bytes = shape.rows.bytes();
  const RowCacheLayout layout{shape.kv_heads, slots, row_bytes};
  return {reinterpret_cast<uint64_t*>(view.row_cache) + first,
          reinterpret_cast<uint32_t*>(view.row_cache + layout.stamps()) + first,
          view.row_cache + layout.rows() + first * row_bytes,
          uint32_t(row_bytes),
          int(slots / kCacheWays),
          uint32_t(view.generation),
          uint32_t(view.total)};
}

template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::choose_from(int candidates) {
  candidates_ = candidates;
  first_ = device::part_begin(candidates, cluster_.first_part());
  count_ = device::part_begin(candidates, cluster_.end_part()) - first_;
  mine_ = device::KeysOfLane(count_);
}

template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::look_up_positions() {
#pragma unroll
  for (int turn = 0; turn < kLookedUp; ++turn) {
    const int i = mine_.key(turn);
    offsets_[turn] = i < mine_.end ? __ldcg(block_.context.scratch.candidates + first_ + i) : 0;
  }
}

template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::look_up_segments() {
#pragma unroll
  for (int turn = 0; turn < kLookedUp; ++turn) {
    const int position = block_.context.zone.begin + offsets_[turn];
    segments_[turn] = mine_.key(turn) < mine_.end ? segment_of(block_.context, position) : nullptr;
  }
}

template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::start_early(
    const bool (&passes)[kLookedUp]) {
  if (!device::kBulkCopies) return;
  uint32_t passing = 0;  // a bit for each turn
#pragma unroll
  for (int turn = 0; turn < kLookedUp; ++turn) passing |= uint32_t(passes[turn]) << turn;
  // What has been looked up goes round once: a loop is shorter than what it does four times.
#pragma unroll 1
  for (int turn = 0; turn < kLookedUp; ++turn) {
    const int offset = offsets_[0];
    const char* segment = segments_[0];
    if (passing >> turn & 1) {
      const int place = space_.early.start(block_.context.shape.row_bytes, [&] {
        device::SelectedRow row = row_of(first_ + mine_.key(turn), offset, segment);
        ask_cache(row);
        return row;
      });
      early_ |= uint32_t(place) << 8 * turn;
    }
#pragma unroll
    for (int i = 0; i + 1 < kLookedUp; ++i) {
      offsets_[i] = offsets_[i + 1];
      segments_[i] = segments_[i + 1];
    }
    offsets_[kLookedUp - 1] = offset;
    segments_[kLookedUp - 1] = segment;
  }
}

template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::note(int at, int candidate, int turn) {
  if (at >= kListedRows) return;
  int offset = offsets_[0];
  const char* segment = segments_[0];
#pragma unroll
  for (int other = 1; other < kLookedUp; ++other) {
    if (turn == other) offset = offsets_[other], segment = segments_[other];
  }
  const int place = turn < kLookedUp ? int(early_ >> 8 * turn & 255) : 0;
  space_.early.note(at, place);
  space_.list[at] = place > 0          ? space_.early.list[place - 1]
                    : turn < kLookedUp ? row_of(candidate, offset, segment)
                                       : row_of(candidate);
}

template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::close(int rows, int offset) {
  const HeadScratch& scratch = block_.context.scratch;
  list_ = space_.list;
  if (rows > kListedRows) {
    list_ = scratch.rows + offset;
    for (int i = int(threadIdx.x); i < rows; i += device::kThreads) {
      list_[i] = row_of(__ldcg(scratch.selected + offset + i));
    }
    __syncthreads();
  }
  // One more than there are: parts after the last row begin there.
  for (int i = int(threadIdx.x); i <= rows; i += device::kThreads) {
    const int last = i > 0 ? part_of(list_[i - 1].candidate & ~kInTail) : cluster_.first_part() - 1;
    const int part = i < rows ? part_of(list_[i].candidate & ~kInTail) : cluster_.end_part();
    for (int begins = last + 1; begins <= part; ++begins) {
      space_.begins[begins - cluster_.first_part()] = i;
    }
    if (i < rows && !addresses().is_placed(i)) ask_cache(list_[i]);
  }
  device::ptx::fence_proxy_async_shared();
  if (threadIdx.x == 0) space_.early.close();
  __syncthreads();
}

/** A row, before the cache has been asked. */
template <typename Element, int kWords>
__device__ __forceinline__ device::SelectedRow RowList<Element, kWords>::row_of(
    int candidate, int offset, const char* segment) const {
  const int position = block_.context.zone.begin + offset;
  return {reinterpret_cast<uint64_t>(row_in(block_.context, segment, position)), position,
          candidate | (tail_.has(position) ? kInTail : 0)};
}

template <typename Element, int kWords>
__device__ __forceinline__ device::SelectedRow RowList<Element, kWords>::row_of(
    int candidate) const {
  const int offset = __ldcg(block_.context.scratch.candidates + candidate);
  return row_of(candidate, offset, segment_of(block_.context, block_.context.zone.begin + offset));
}

/** Whether the cache has a row, or is to have it. */
template <typename Element, int kWords>
__device__ __forceinline__ void RowList<Element, kWords>::ask_cache(device::SelectedRow& row) {
  using Keep = device::KeepInCache;
  const device::RowCache& cache = space_.cache;
  const int position = row.fresh;
  const int slot = cache.find(cache.tags_at(position), position);
  if (slot >= 0) {
    stamped_ |= cache.stamp(slot);
    row.address = reinterpret_cast<uint64_t>(cache.row(slot));
    row.fresh = Keep::kFound;
  } else if (position + 1 == block_.context.total) {
    // The last token's row is written anew when a recorded step is replayed.
    row.fresh = Keep::kUnwanted;
  }
}

/** The part that a candidate lies in: the last one that begins there or before. */
template <typename Element, int kWords>
__device__ __forceinline__ int RowList<Element, kWords>::part_of(int candidate) const {
  if (cluster_.size == device::kParts) return cluster_.rank;
  return int((uint32_t(candidate + 1) * device::kParts - 1) / uint32_t(candidates_));
}

}  // namespace pariskv::cuda
