/** What a block of the decode kernels works on: its kv head, its part of the scratch. */
#pragma once

#include "device/attend_shape.cuh"
#include "device/partition.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/params.h"
#include "pariskv/decode/query.cuh"
#include "pariskv/decode/zone.cuh"

namespace pariskv::cuda {

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
  int total;
  int searched;  // candidates wanted; 0: everything is resident
  device::Zone zone;
  device::AttendShape shape;
  HeadScratch scratch;
  int64_t candidate_capacity;
};

/** All but the scratch. */
template <typename Element>
__device__ __forceinline__ void fill_context(const StepParams& step, const SequenceView& from,
                                             int row, int head, HeadContext& context) {
  const ModelShape& model = step.call.shape;
  const SequenceView view = from;  // all of it at once, before anything is stored
  context.row = row;
  context.head = head;
  context.rows = view.rows;
  context.total = int(view.total);
  context.searched = int(view.plan[0]);  // ParisKvPlan
  context.zone = {view.summaries,       {model.kv_heads, model.segment_tokens, model.rotated_dim},
                  step.by_segment,      head,
                  int(view.zone_begin), int(view.zone_end)};
  context.shape = {int(model.rows.key_dim), int(model.rows.value_dim), int(model.group),
                   int(model.rows.bytes()), step.call.logits.scale,    step.call.logits.softcap};
}

/** A block at work for one head: what all kernels share. */
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
  /** The same, when no more is known than what head it is. */
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

/** The scratch of another head of the lane: an address of the first head's, moved. */
__device__ __forceinline__ uint64_t scratch_word(const Lane& lane, int head, int word) {
  return reinterpret_cast<const uint64_t*>(&lane.scratch)[word] + uint64_t(head * lane.head_bytes);
}
constexpr int kScratchWords = int(sizeof(HeadScratch) / sizeof(uint64_t));
static_assert(kScratchWords <= 32);

/**
 * A block's way from its index to its head: false when the lane is nobody's. All threads; to be
 * followed by a barrier.
 * @param also  also(view, head), by one thread
 * @param look  look(lane, head), by one warp
 */
template <typename Element, typename Also, typename Look>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also, Look look) {
  const uint32_t heads = uint32_t(step.call.shape.kv_heads);
  index += uint32_t(step.call.first_head);
  const uint32_t row = step.by_kv_heads(int(index));
  const Lane& lane = step.call.lanes[row];
  const SequenceView* layers = lane.layers;
  if (layers == nullptr) return false;
  const int head = int(index - row * heads);
  // Each of these is a trip to memory, by a warp of its own so that they are made together.
  const int warp = device::warp_id(), lane_of_warp = device::lane_id();
  if (threadIdx.x == 0) {
    fill_context<Element>(step, layers[step.call.layer], int(row), head, context);
  } else if (warp == 1 && lane_of_warp < kScratchWords) {
    reinterpret_cast<uint64_t*>(&context.scratch)[lane_of_warp] =
        scratch_word(lane, head, lane_of_warp);
  } else if (threadIdx.x == 64) {
    context.candidate_capacity = lane.candidate_capacity;
  } else if (threadIdx.x == 96) {
    also(layers[step.call.layer], head);
  } else if (warp == 4) {
    look(lane, head);
  }
  return true;
}
template <typename Element, typename Also>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also) {
  return find_context<Element>(step, index, context, also, [](const Lane&, int) {});
}
template <typename Element>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context) {
  return find_context<Element>(step, index, context, [](const SequenceView&, int) {});
}

}  // namespace pariskv::cuda
