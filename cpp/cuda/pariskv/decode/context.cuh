/** The head that a thread block of the decode kernels works on, its scratch, and the way there. */
#pragma once

#include "device/attend_shape.cuh"
#include "device/common_rows.cuh"
#include "device/partition.cuh"
#include "device/signal.cuh"
#include "device/stored_rows.cuh"
#include "device/warp.cuh"
#include "idle.cuh"
#include "pariskv/decode/params.h"
#include "pariskv/decode/query.cuh"
#include "pariskv/decode/statistics.cuh"
#include "pariskv/decode/zone.cuh"
#include "policy/pariskv/plan.h"
#include "tail.h"

namespace pariskv::cuda {

/** Shared memory of a block on the devices that have least. */
constexpr int kLeastSharedBytes = 99 << 10;

/** Registers of a thread: two blocks of score leave room for 256 threads with 96. With 256
 * dimensions they are not enough, and such blocks come later. */
template <int kWords>
constexpr int kRegistersBesideScore = kWords == 16  ? 240
                                      : kWords == 8 ? 128
                                                    : 96;

/** Read from device memory once, then from shared memory where needed. */
struct HeadContext {
  int row, head;  // of the batch; kv head
  void* const* rows;
  void* const* zone_rows;     // those of the zone, which may be narrow
  const char* tail_copies;    // of rows of the tail; null: a call that only explains has none
  const float* tail_numbers;  // their common part
  int total;
  int searched;  // candidates wanted; 0: everything is resident
  device::Zone zone;
  int zone_row_bytes, tail_row_bytes;
  device::AttendShape shape;  // of resident rows, unless a kernel only reads rows of the zone
  uint32_t tail_seed;         // that rows of the tail are drawn by; here it takes no room
  const float* stretch;       // (key_dim) of queries, see Balance; null: keys are encoded whole
  const int16_t* centre;      // (key_dim) of keys, in steps of
  const float* centre_step;
  HeadScratch scratch;
  int64_t candidate_capacity;
};

/** A block at work for one head, in any kernel. */
template <typename Element, int kWords>
struct HeadBlock {
  const DecodeCall& call;
  const HeadContext& context;

  __device__ __forceinline__ int searchers() const { return int(call.searchers); }
  __device__ __forceinline__ bool mean() const { return call.group_rule == GroupRule::kMeanQuery; }
  __device__ __forceinline__ bool searches() const { return context.searched > 0; }

  __device__ __forceinline__ Element* at(const Rows& tensor, int64_t j) const {
    return reinterpret_cast<Element*>(tensor.data) + context.row * tensor.stride_i +
           j * tensor.stride_j;
  }
  /** Queries of this head. */
  __device__ __forceinline__ const Element* queries() const {
    return at(call.q, int64_t(context.head) * context.shape.group);
  }
  /** The sink biases of this head's queries from `member` on; null: none. */
  __device__ __forceinline__ const float* biases(int member) const {
    if (call.logits.sink_bias == nullptr) return nullptr;
    return call.logits.sink_bias + int64_t(context.head) * context.shape.group + member;
  }
  /** The rows of q that searchers stand for. */
  __device__ __forceinline__ auto rows_of_searchers() const {
    return rows_of_head(call, context.row, context.head);
  }

  /** A query that is spread over a warp takes on the balance of the head's channels. */
  __device__ __forceinline__ void stretch(float (&x)[kWords]) const {
    if (context.stretch == nullptr) return;
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const int d = 32 * r + device::lane_id();
      if (d < context.shape.key_dim) x[r] = __fmul_rn(x[r], context.stretch[d]);
    }
  }

  /** rows_of_searchers, when only the number of the head is known. */
  static __device__ __forceinline__ auto rows_of_head(const DecodeCall& call, int row, int head) {
    return [&call, row, head](int searcher) {
      const int group = int(call.shape.group);
      const bool mean = call.group_rule == GroupRule::kMeanQuery;
      const auto* first = reinterpret_cast<const Element*>(call.q.data) + row * call.q.stride_i +
                          (int64_t(head) * group + searcher) * call.q.stride_j;
      return device::QueryRows<Element>{first, call.q.stride_j, mean ? group : 1, mean,
                                        int(call.shape.rows.key_dim)};
    };
  }
};

/** All but the scratch. */
template <typename Element>
__device__ __forceinline__ void fill_context(const StepParams& step, const SequenceView& from,
                                             int row, int head, HeadContext& context) {
  const ModelShape& model = step.call.shape;
  const SummaryLayout& layout = step.call.codec.layout;
  const SequenceView view = from;  // all of it at once, before anything is stored
  context.row = row;
  context.head = head;
  context.rows = view.rows;
  context.zone_rows = model.narrows() ? view.narrow_rows : view.rows;
  const ContextBytes& bytes = step.call.bytes;
  context.tail_copies = nullptr;
  context.tail_numbers = nullptr;
  if (view[Part::kTailCopies] != nullptr) {
    context.tail_copies = view[Part::kTailCopies] + bytes.tail_first + head * bytes.tail_head;
    context.tail_numbers =
        reinterpret_cast<const float*>(view[Part::kTailCopies] + head * int64_t(bytes.tail_common));
  }
  context.tail_seed = uint32_t(view.tail_seed);
  context.total = int(view.total);
  context.searched = int(ParisKVPlan::candidates_of(view));
  context.zone = {view.summaries,
                  layout,
                  step.by_segment,
                  head,
                  int(view.zone_begin),
                  int(view.zone_end),
                  layout.block == 0 ? 0 : device::log2_of_power(int(layout.block))};
  const auto balance = device::balance_of(layout, model.rows.key_dim, view[Part::kState], head);
  context.stretch = balance.stretch;
  context.centre = balance.centre;
  context.centre_step = balance.centre_step;
  context.shape = {
      int(model.rows.key_dim), int(model.rows.value_dim), int(model.group), bytes.row, bytes.row,
      step.call.logits.scale,  step.call.logits.softcap};
  context.zone_row_bytes = bytes.zone_row;
  context.tail_row_bytes = bytes.tail_row;
}

/** The shape of attention to rows that are written otherwise than resident ones. */
__device__ __forceinline__ void take_format(const RowFormat& rows, device::AttendShape& shape) {
  shape.row_bytes = int(rows.copied_bytes());
  shape.row_room = int(rows.copied_room());
}

/** The scratch of another head of the batch slot: an address of the first head's, moved. */
__device__ __forceinline__ uint64_t scratch_word(const ParisKVSlot& slot, int head, int word) {
  return reinterpret_cast<const uint64_t*>(&slot.scratch)[word] + uint64_t(head * slot.head_bytes);
}

constexpr int kScratchWords = int(sizeof(HeadScratch) / sizeof(uint64_t));

static_assert(kScratchWords <= 32);

/** The row of the batch of a kv head of the launch, counted from `first_head`; negative: none. */
__device__ __forceinline__ int row_of_head(const StepParams& step, uint32_t& index) {
  index += uint32_t(step.call.first_head);
  const uint32_t place = step.by_kv_heads(int(index));
  index -= place * uint32_t(step.call.shape.kv_heads);
  return step.call.searched_rows == nullptr ? int(place) : step.call.searched_rows[place];
}

/**
 * A block's way from its index to its head: false when the slot is idle, or there is none. All
 * threads; to be followed by a barrier.
 * @param also  also(view, head), by one thread
 * @param look  look(slot, head), by one warp
 */
template <typename Element, typename Also, typename Look>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also, Look look) {
  const int row = row_of_head(step, index);
  if (row < 0) return false;
  const int head = int(index);
  const ParisKVSlot& slot = step.call.slots[row];
  const SequenceView* layers = slot.layers;
  if (layers == nullptr) return false;
  // Each of these is a trip to memory, by a warp of its own so that they are made together.
  const int warp = device::warp_id(), lane_of_warp = device::lane_id();
  if (threadIdx.x == 0) {
    fill_context<Element>(step, layers[step.call.layer], row, head, context);
  } else if (warp == 1 && lane_of_warp < kScratchWords) {
    reinterpret_cast<uint64_t*>(&context.scratch)[lane_of_warp] =
        scratch_word(slot, head, lane_of_warp);
  } else if (threadIdx.x == 64) {
    context.candidate_capacity = slot.candidate_capacity;
  } else if (threadIdx.x == 96) {
    also(layers[step.call.layer], head);
  } else if (warp == 4) {
    look(slot, head);
  }
  return true;
}

template <typename Element, typename Also>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also) {
  return find_context<Element>(step, index, context, also, [](const ParisKVSlot&, int) {});
}

template <typename Element>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context) {
  return find_context<Element>(step, index, context, [](const SequenceView&, int) {});
}

/** A head of a slot that is idle, by its index; all threads of a block. */
template <typename Element>
__device__ __forceinline__ void leave_idle_head(const StepParams& step, uint32_t index) {
  const DecodeCall& call = step.call;
  const int64_t row = row_of_head(step, index);
  if (row < 0) return;
  const int head = int(index), group = int(call.shape.group);
  leave_idle<Element>(call, row, head * group, group);
  if (call.error != nullptr && threadIdx.x == 0) call.error[row * call.error_stride + head] = 0;
}

/** The row of a position outside the zone, or of any where it is not narrow. */
__device__ __forceinline__ char* row_at(const HeadContext& context, int position) {
  const int2 place = device::split_position(context.zone, position);
  return device::row_of_segment(static_cast<char*>(context.rows[place.x]), context.head,
                                context.zone.layout.tokens, place.y, context.shape.row_bytes);
}
/** The rows of the segment of a position of the zone, and the position's own among them. */
__device__ __forceinline__ const char* zone_segment(const HeadContext& context, int position) {
  return static_cast<const char*>(context.zone_rows[context.zone.segment(position)]);
}
__device__ __forceinline__ const char* zone_row_in(const HeadContext& context, const char* segment,
                                                   int position) {
  const int slot = device::split_position(context.zone, position).y;
  return device::row_of_segment(segment, context.head, context.zone.layout.tokens, slot,
                                context.zone_row_bytes);
}

/**
 * The tail of a step (tail.h): none where all of the zone is selected. The kernel of the resident
 * rows attends to it before any row is selected: each row counts for its share of the zone, and its
 * logits are stored. A row that is then selected takes back its share of the tail, so no block has
 * to know which rows other blocks select.
 */
__device__ __forceinline__ Tail tail_of(const DecodeCall& call, const HeadContext& context) {
  return Tail::beside(min(call.top_k, int64_t(context.searched)), context.zone.begin,
                      context.zone.end, call.tail_rows, context.tail_seed);
}
/** The copy of its row i. */
__device__ __forceinline__ const char* tail_copy(const HeadContext& context, int i) {
  return context.tail_copies + int64_t(i) * context.tail_row_bytes;
}
/** Their common part. */
__device__ __forceinline__ device::CommonRows tail_common(const HeadContext& context) {
  return {context.tail_numbers, context.shape.key_dim, context.shape.value_dim};
}
/** How many keys each row stands for. */
__device__ __forceinline__ float weight_of(const device::Zone& zone, const Tail& tail) {
  return tail.weight(zone.end - zone.begin);
}

}  // namespace pariskv::cuda
