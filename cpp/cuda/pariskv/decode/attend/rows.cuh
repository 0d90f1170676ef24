/**
 * Which rows a block of the last kernel attends to: the selected ones of its candidates. Where they
 * lie is looked up for the first candidates of every lane while their worth is being computed.
 * Definitions are in rows_impl.cuh.
 */
#pragma once

#include "pariskv/decode/attend/early_rows.cuh"
#include "pariskv/decode/attend/row_cache.cuh"
#include "pariskv/decode/attend/topk.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/tail_rows.cuh"

namespace pariskv::cuda {

static_assert(kCacheWays == device::kWays);

/** Candidates of a lane that are looked up ahead. */
constexpr int kLookedUp = device::kKept;
static_assert(kLookedUp <= 4, "early_ has a byte for each");

/** Of a block, in shared memory. */
struct RowSpace {
  device::RowCache cache;
  device::SelectedRow list[kListedRows];
  int begins[device::kParts + 1];  // of this block's parts, and the end of the last one
  EarlyRows early;
};

/** What a head's row cache has. While a step is explained there is none: it leaves no trace. */
template <typename Element>
__device__ __forceinline__ device::RowCache row_cache_of(const DecodeCall& call,
                                                         const SequenceView& view, int head);

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
struct SelectedRows {
  const device::SelectedRow* rows;
  RowSpace& space;
  int row_bytes;
  bool listed;               // in shared memory
  const float* tail_logits;  // (rows of the tail, group)
  int group;
  float weight;  // of each of these

  __device__ __forceinline__ float noted(int, int, float logit) const { return logit; }
  /** A row of the tail has been counted for others; now it counts as itself alone. */
  __device__ __forceinline__ float corrected(int i, int head, float share, float shift) const {
    const int number = rows[i].where >> 8;
    if (number == 0 || head >= group) return share;
    const float logit = __ldcg(tail_logits + (number - 1) * group + head);
    // Two sums in other orders: of huge numbers they may be apart by more than an exponential has.
    return __fmaf_rn(-weight, device::exp_of(fminf(logit - shift, 1.0f)), share);
  }
  static constexpr bool kHides = true;
  /** What is not finite of a row of the tail is in the tail's part already, and stays there. */
  __device__ __forceinline__ bool hides_values(int i, float) const { return rows[i].where >> 8; }
  __device__ __forceinline__ const char* operator()(int i) const {
    return reinterpret_cast<const char*>(rows[i].address);
  }
  __device__ __forceinline__ bool is_placed(int i) const {
    return listed && space.early.is_placed(i);
  }
  __device__ __forceinline__ const char* placed(int i) const {
    return space.early.row(i, row_bytes);
  }
  __device__ __forceinline__ void await_placed() const { space.early.wait(); }
};

/**
 * The rows of a block: an object of each thread, for all threads. In order: `choose_from`, the
 * look-ups (`look_up_positions`, then `look_up_segments`), `start_early` where rows may, `note` for
 * each selected row, `close`; after it the rows, their parts and addresses can be read.
 */
template <typename Element, int kWords>
class RowList {
 public:
  __device__ __forceinline__ RowList(const HeadBlock<Element, kWords>& block,
                                     const device::Cluster& cluster, RowSpace& space,
                                     const Tail& tail)
      : block_(block), cluster_(cluster), space_(space), tail_(tail) {}

  /** Rows are selected from so many candidates. */
  __device__ __forceinline__ void choose_from(int candidates);

  /** This block's candidates. */
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int count() const { return count_; }

  /** Asks for positions of the lane's first candidates. */
  __device__ __forceinline__ void look_up_positions();
  /** Asks for the segments with their rows: the positions have had time to come. */
  __device__ __forceinline__ void look_up_segments();

  /**
   * Rows that pass for certain start, as many as there is room for.
   * @param passes  of the lane's candidates that are looked up: as find_top_k says
   */
  __device__ __forceinline__ void start_early(const bool (&passes)[kLookedUp]);

  /** Row `at` of this block is a candidate that is number `turn` of the lane. */
  __device__ __forceinline__ void note(int at, int candidate, int turn);

  /**
   * When all are noted: where they are to come from, and where parts begin. All threads; ends with
   * a barrier.
   * @param rows    of this block
   * @param offset  rows of the head before them
   */
  __device__ __forceinline__ void close(int rows, int offset);

  __device__ __forceinline__ device::SelectedRow* rows() const { return list_; }
  __device__ __forceinline__ SelectedParts parts() const {
    return {space_.begins, cluster_.first_part(), cluster_.end_part()};
  }
  __device__ __forceinline__ SelectedRows addresses() const {
    const HeadContext& context = block_.context;
    return {list_,
            space_,
            context.shape.row_bytes,
            list_ == space_.list,
            context.scratch.tail_logits,
            context.shape.group,
            weight_of(context.zone, tail_)};
  }
  /** All results of RowCache::stamp of this thread: see KeepInCache. */
  __device__ __forceinline__ uint32_t stamped() const { return stamped_; }

 private:
  __device__ __forceinline__ device::SelectedRow row_of(int candidate, int offset,
                                                        const char* segment) const;
  __device__ __forceinline__ device::SelectedRow row_of(int candidate) const;
  __device__ __forceinline__ void ask_cache(device::SelectedRow& row);
  __device__ __forceinline__ int part_of(int candidate) const;

  const HeadBlock<Element, kWords>& block_;
  const device::Cluster& cluster_;
  RowSpace& space_;
  const Tail& tail_;
  int candidates_ = 0, first_ = 0, count_ = 0;
  device::KeysOfLane mine_{0};
  device::SelectedRow* list_ = nullptr;
  int offsets_[kLookedUp];  // from the zone's begin
  const char* segments_[kLookedUp];
  uint32_t stamped_ = 0;  // see KeepInCache
  uint32_t early_ = 0;    // a byte each: its place, plus 1, of a row that has set out
};

}  // namespace pariskv::cuda
