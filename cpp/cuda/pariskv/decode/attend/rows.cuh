/**
 * Which rows a block of the last kernel attends to: the selected ones of its candidates. Where they
 * lie is looked up for the first candidates of every lane while their worth is being computed.
 */
#pragma once

#include <type_traits>

#include "device/copy.cuh"
#include "device/narrow_rows.cuh"
#include "device/row_cache.cuh"
#include "device/tiles.cuh"
#include "device/topk.cuh"
#include "head_row_cache.cuh"
#include "narrow.h"
#include "pariskv/decode/context.cuh"

namespace pariskv::cuda {

/** Rows that are listed in shared memory, where a block attends to no more. */
constexpr int kListedRows = 512;
/** Room for rows that start early, and how many have room at most. */
constexpr int kEarlyBytes = 8192;
constexpr int kEarlyRows = 32;
static_assert(kEarlyRows < 256, "a place is a byte");

/**
 * Rows that start early. While the blocks of a cluster still decide on the last of the top k, some
 * rows are already certain to be selected: their copies start then, into room of their own, and
 * attention finds them there. Only where a launch says `start_rows_early`, and where there is a
 * copy engine: of many heads, the rows of some keep the bus busy anyway.
 *
 * | step | by | when |
 * | --- | --- | --- |
 * | `open` | one thread | the block starts |
 * | `start` | the thread that has the row | the first exchange of the top k says that it passes |
 * | `note` | the same thread | the row's index among the block's selected rows is known |
 * | `close` | one thread | after all of these: no row starts any more |
 * | `is_placed`, `room` | all threads | after the barrier of the block that follows `close` |
 * | `wait` | all threads | before a row is read |
 *
 * Used once in a launch.
 */
struct EarlyRows {
  uint64_t arrived;  // a barrier: rows that have started, and `close`
  int count;         // rows that have started, or found no room
  device::SelectedRow list[kEarlyRows];
  uint8_t places[kListedRows];  // of selected rows: where among the early ones they are, plus 1
  alignas(128) char rows[kEarlyBytes];

  /** Before what makes barriers known to the copy engine. */
  __device__ __forceinline__ void open() {
    device::ptx::mbarrier_init(&arrived, 1);
    count = 0;
  }

  /**
   * Starts the copy of a row, where there is room.
   * @param find  find() is the row
   * @return its place, plus 1; 0: there is no room
   */
  template <typename Reader, typename Find>
  __device__ __forceinline__ int start(const device::AttendShape& shape, Find find) {
    const int place = atomicAdd(&count, 1);
    if (place >= min(kEarlyBytes / shape.row_room, kEarlyRows)) return 0;
    const device::SelectedRow row = find();
    device::RowCopies::expect(&arrived, uint32_t(shape.row_bytes));
    const auto* from = reinterpret_cast<const char*>(row.address);
    device::RowCopies::start(rows + place * shape.row_room + Reader::place(from),
                             from - Reader::lead(from), uint32_t(shape.row_bytes), &arrived);
    list[place] = row;
    return place + 1;
  }

  /** Selected row `at` of this block has this place, as `start` returns it. */
  __device__ __forceinline__ void note(int at, int place) { places[at] = uint8_t(place); }
  __device__ __forceinline__ void close() {
    if (device::kBulkCopies) device::ptx::mbarrier_arrive(&arrived);
  }

  __device__ __forceinline__ bool is_placed(int at) const {
    return device::kBulkCopies && places[at] > 0;
  }
  __device__ __forceinline__ const char* room(int at, int row_room) const {
    return rows + (places[at] - 1) * row_room;
  }
  __device__ __forceinline__ void wait() {
    if (device::kBulkCopies) device::wait(&arrived, 0);
  }
};

/** Candidates of a lane that are looked up ahead. */
constexpr int kLookedUp = device::kKeysInRegisters;

static_assert(kLookedUp <= 4, "early_ has a byte for each");

/** Of listed narrow rows, those whose means are looked up ahead. */
constexpr int kListedMeans = 128;

/** Of narrow rows, in shared memory: their common part, and where means of listed ones are. */
struct NarrowSpace {
  NarrowBase base;
  union {
    int position;
    float step;
  } rows[kListedRows];  // of the first ones the step, once `look_up_means` has been called
  const int8_t* levels[kListedMeans];

  /** Asks for the common part of values, which no other kernel reads. All threads. */
  __device__ __forceinline__ void prefetch(int value_dim) const {
    constexpr int kLine = 128 / int(sizeof(float));
    const int d = kLine * int(threadIdx.x);
    if (base.any() && d < 2 * value_dim) device::ptx::prefetch_global_l2(base.values().centre + d);
  }
};
struct NoNarrowSpace {
  __device__ __forceinline__ void prefetch(int) const {}
};

/** Of a block, in shared memory. */
template <bool kNarrow>
struct RowSpace {
  std::conditional_t<kNarrow, NarrowSpace, NoNarrowSpace> narrow;
  device::RowCache cache;
  device::SelectedRow list[kListedRows];
  int begins[device::kParts + 1];  // of this block's parts, and the end of the last one
  EarlyRows early;
};

/** Parts of a block's selected rows: those that lie in one part of the candidates. */
struct SelectedParts {
  const int* begins;
  int first, end;  // parts

  __device__ __forceinline__ int begin(int part) const { return begins[part - first]; }
  __device__ __forceinline__ int most() const {
    int most = 0;
    for (int part = first; part < end; ++part) most = max(most, begin(part + 1) - begin(part));
    return most;
  }
};

/** Where a block's selected rows lie. */
template <typename Element, bool kNarrow>
struct SelectedRows {
  using Reader = device::ZoneReader<Element, kNarrow>;
  /** Rows of the tail have been counted for others; now they count as themselves alone. */
  static constexpr bool kCounted = true;
  static constexpr device::RowsLess kLess =
      kNarrow ? device::RowsLess::kBase : device::RowsLess::kNothing;

  const HeadContext& context;
  const device::SelectedRow* rows;
  RowSpace<kNarrow>& space;
  bool listed;   // in shared memory
  float weight;  // of each of the tail's rows

  __device__ __forceinline__ float noted(int, int, float logit) const { return logit; }
  /** What narrow rows have in common, and the mean of the keys around row i. */
  __device__ __forceinline__ const NarrowBase& base() const { return space.narrow.base; }
  __device__ __forceinline__ NarrowBase::Mean mean(int i) const {
    const NarrowSpace& narrow = space.narrow;
    if (listed && i < kListedMeans) return {narrow.levels[i], narrow.rows[i].step};
    const int position = listed ? narrow.rows[i].position : position_of(rows + i);
    const device::Slot at = device::slot_of(context.zone, position);
    return narrow.base.mean(at.block, at.slot);
  }
  /** The copy of row i in the tail. */
  __device__ __forceinline__ const char* counted(int i) const {
    const int number = rows[i].where >> 8;
    return number == 0 || context.tail_copies == nullptr ? nullptr : tail_copy(context, number - 1);
  }
  /** Their common part. */
  __device__ __forceinline__ device::CommonRows common() const { return tail_common(context); }
  /** The logit that it was counted with, and how many times; minus infinity: not at all. */
  __device__ __forceinline__ float logit_before(int i, int head) const {
    const int number = rows[i].where >> 8, group = context.shape.group;
    if (number == 0 || head >= group) return -device::infinity();
    return __ldcg(context.scratch.tail_logits + (number - 1) * group + head);
  }
  __device__ __forceinline__ float weight_before() const { return weight; }
  __device__ __forceinline__ const char* operator()(int i) const {
    return reinterpret_cast<const char*>(rows[i].address);
  }
  __device__ __forceinline__ bool is_placed(int i) const {
    return listed && space.early.is_placed(i);
  }
  __device__ __forceinline__ const char* placed(int i) const {
    return space.early.room(i, context.shape.row_room);
  }
  __device__ __forceinline__ void await_placed() const { space.early.wait(); }

 private:
  /** Of a row that is not listed: its number among the head's is that of its candidate. */
  __device__ __forceinline__ int position_of(const device::SelectedRow* row) const {
    const HeadScratch& scratch = context.scratch;
    const int candidate = __ldcg(scratch.selected + (row - scratch.rows));
    return context.zone.begin + __ldcg(scratch.candidates + candidate);
  }
};

/**
 * The rows of a block: an object of each thread, for all threads. In order: `choose_from`, the
 * look-ups (`look_up_positions`, then `look_up_segments`), `start_early` where rows may, `note` for
 * each selected row, `close`; after it the rows, their parts and addresses can be read.
 */
template <typename Element, int kWords, bool kNarrow>
class RowList {
  using Reader = device::ZoneReader<Element, kNarrow>;

 public:
  __device__ __forceinline__ RowList(const HeadBlock<Element, kWords>& block,
                                     const device::Cluster& cluster, RowSpace<kNarrow>& space,
                                     const Tail& tail)
      : block_(block), cluster_(cluster), space_(space), tail_(tail) {}

  /** Rows are selected from so many candidates. */
  __device__ __forceinline__ void choose_from(int candidates) {
    candidates_ = candidates;
    first_ = device::part_begin(candidates, cluster_.first_part());
    count_ = device::part_begin(candidates, cluster_.end_part()) - first_;
    mine_ = device::KeysOfLane(count_);
  }

  /** This block's candidates. */
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int count() const { return count_; }

  /** Asks for positions of the lane's first candidates. */
  __device__ __forceinline__ void look_up_positions() {
#pragma unroll
    for (int turn = 0; turn < kLookedUp; ++turn) {
      const int i = mine_.key(turn);
      offsets_[turn] = i < mine_.end ? __ldcg(block_.context.scratch.candidates + first_ + i) : 0;
    }
  }
  /** Asks for the segments with their rows: the positions have had time to come. */
  __device__ __forceinline__ void look_up_segments() {
#pragma unroll
    for (int turn = 0; turn < kLookedUp; ++turn) {
      const int position = block_.context.zone.begin + offsets_[turn];
      segments_[turn] =
          mine_.key(turn) < mine_.end ? zone_segment(block_.context, position) : nullptr;
    }
  }

  /**
   * Rows that pass for certain start, as many as there is room for.
   * @param passes  of the lane's candidates that are looked up: as find_top_k says
   */
  __device__ __forceinline__ void start_early(const bool (&passes)[kLookedUp]) {
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
        const device::AttendShape& shape = block_.context.shape;
        const int place = space_.early.template start<Reader>(shape, [&] {
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

  /** Row `at` of this block is a candidate that is number `turn` of the lane. */
  __device__ __forceinline__ void note(int at, int candidate, int turn) {
    if (at >= kListedRows) return;
    int offset = offsets_[0];
    const char* segment = segments_[0];
#pragma unroll
    for (int other = 1; other < kLookedUp; ++other) {
      if (turn == other) offset = offsets_[other], segment = segments_[other];
    }
    const int place = turn < kLookedUp ? int(early_ >> 8 * turn & 255) : 0;
    space_.early.note(at, place);
    if constexpr (kNarrow) {
      const int own =
          turn < kLookedUp ? offset : __ldcg(block_.context.scratch.candidates + candidate);
      space_.narrow.rows[at].position = block_.context.zone.begin + own;
    }
    space_.list[at] = place > 0          ? space_.early.list[place - 1]
                      : turn < kLookedUp ? row_of(candidate, offset, segment)
                                         : row_of(candidate);
  }

  /**
   * When all are noted: where they are to come from, and where parts begin. All threads; ends with
   * a barrier.
   * @param rows    of this block
   * @param offset  rows of the head before them
   */
  __device__ __forceinline__ void close(int rows, int offset) {
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
      const int last = i > 0 ? list_[i - 1].where & 255 : cluster_.first_part() - 1;
      const int part = i < rows ? list_[i].where & 255 : cluster_.end_part();
      for (int begins = last + 1; begins <= part; ++begins) {
        space_.begins[begins - cluster_.first_part()] = i;
      }
      if (i < rows && !addresses().is_placed(i)) ask_cache(list_[i]);
    }
    device::ptx::fence_proxy_async_shared();
    if (threadIdx.x == 0) space_.early.close();
    __syncthreads();
  }

  /**
   * Where the means of the first rows are: two trips to memory, so while rows are on their way.
   * All threads; has a barrier.
   */
  __device__ __forceinline__ void look_up_means() const {
    if constexpr (kNarrow) {
      NarrowSpace& narrow = space_.narrow;
      const int all = space_.begins[cluster_.end_part() - cluster_.first_part()];
      const bool looks = narrow.base.any() && list_ == space_.list;
      const int count = looks ? min(all, kListedMeans) : 0;
      for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
        const device::Slot at = device::slot_of(block_.context.zone, narrow.rows[i].position);
        const NarrowBase::Mean mean = narrow.base.mean(at.block, at.slot);
        narrow.levels[i] = mean.levels;
        narrow.rows[i].step = mean.step;
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ device::SelectedRow* rows() const { return list_; }
  __device__ __forceinline__ SelectedParts parts() const {
    return {space_.begins, cluster_.first_part(), cluster_.end_part()};
  }
  __device__ __forceinline__ SelectedRows<Element, kNarrow> addresses() const {
    const HeadContext& context = block_.context;
    return {context, list_, space_, list_ == space_.list, weight_of(context.zone, tail_)};
  }
  /** All results of RowCache::stamp of this thread: see CacheRows. */
  __device__ __forceinline__ uint32_t stamped() const { return stamped_; }

 private:
  /** A row, before the cache has been asked. */
  __device__ __forceinline__ device::SelectedRow row_of(int candidate, int offset,
                                                        const char* segment) const {
    const int position = block_.context.zone.begin + offset;
    return {reinterpret_cast<uint64_t>(zone_row_in(block_.context, segment, position)), position,
            part_of(candidate) | (tail_.has(position) ? tail_.number(position) + 1 : 0) << 8};
  }
  __device__ __forceinline__ device::SelectedRow row_of(int candidate) const {
    const int offset = __ldcg(block_.context.scratch.candidates + candidate);
    return row_of(candidate, offset,
                  zone_segment(block_.context, block_.context.zone.begin + offset));
  }
  /** Whether the cache has a row, or is to have it. */
  __device__ __forceinline__ void ask_cache(device::SelectedRow& row) {
    using Caching = device::CacheRows;
    const device::RowCache& cache = space_.cache;
    const int position = row.fresh;
    const int slot = cache.find(cache.tags_at(position), position);
    if (slot >= 0) {
      stamped_ |= cache.stamp(slot);
      const int lead = Reader::lead(reinterpret_cast<const char*>(row.address));
      row.address = reinterpret_cast<uint64_t>(cache.row(slot)) + uint64_t(lead);
      row.fresh = Caching::kFound;
    } else if (position + 1 == block_.context.total) {
      // The last token's row is written anew when a recorded step is replayed.
      row.fresh = Caching::kUnwanted;
    }
  }
  /** The part that a candidate lies in: the last one that begins there or before. */
  __device__ __forceinline__ int part_of(int candidate) const {
    if (cluster_.size == device::kParts) return cluster_.rank;
    return int((uint32_t(candidate + 1) * device::kParts - 1) / uint32_t(candidates_));
  }

  const HeadBlock<Element, kWords>& block_;
  const device::Cluster& cluster_;
  RowSpace<kNarrow>& space_;
  const Tail& tail_;
  int candidates_ = 0, first_ = 0, count_ = 0;
  device::KeysOfLane mine_{0};
  device::SelectedRow* list_ = nullptr;
  int offsets_[kLookedUp];  // from the zone's begin
  const char* segments_[kLookedUp];
  uint32_t stamped_ = 0;  // see CacheRows
  uint32_t early_ = 0;    // a byte each: its place, plus 1, of a row that has set out
};

}  // namespace pariskv::cuda
