/** Definitions of context.cuh: the way from the index of a block to its head. */
#pragma once

#include "pariskv/decode/context.cuh"
#include "pariskv/decode/statistics.cuh"
#include "policy/pariskv/plan.h"

namespace pariskv::cuda {

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
  context.tail_copies = view.tail_copies;
  context.total = int(view.total);
  context.searched = int(ParisKVPlan::of(view).candidates);
  context.zone = {view.summaries,
                  layout,
                  step.by_segment,
                  head,
                  int(view.zone_begin),
                  int(view.zone_end),
                  layout.block == 0 ? 0 : device::log2_of_power(int(layout.block))};
  const auto balance = device::balance_of(layout, model.rows.key_dim, view.state, head);
  context.stretch = balance.stretch;
  context.centre = balance.centre;
  context.centre_step = balance.centre_step;
  context.shape = {int(model.rows.key_dim), int(model.rows.value_dim), int(model.group),
                   int(model.rows.bytes()), step.call.logits.scale,    step.call.logits.softcap};
}

/** The scratch of another head of the slot: an address of the first head's, moved. */
__device__ __forceinline__ uint64_t scratch_word(const ParisKVSlot& slot, int head, int word) {
  return reinterpret_cast<const uint64_t*>(&slot.scratch)[word] + uint64_t(head * slot.head_bytes);
}
constexpr int kScratchWords = int(sizeof(HeadScratch) / sizeof(uint64_t));
static_assert(kScratchWords <= 32);

template <typename Element, typename Also, typename Look>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also, Look look) {
  const uint32_t heads = uint32_t(step.call.shape.kv_heads);
  index += uint32_t(step.call.first_head);
  const uint32_t row = step.by_kv_heads(int(index));
  const ParisKVSlot& slot = step.call.slots[row];
  const SequenceView* layers = slot.layers;
  if (layers == nullptr) return false;
  const int head = int(index - row * heads);
  // Each of these is a trip to memory, by a warp of its own so that they are made together.
  const int warp = device::warp_id(), lane_of_warp = device::lane_id();
  if (threadIdx.x == 0) {
    fill_context<Element>(step, layers[step.call.layer], int(row), head, context);
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

}  // namespace pariskv::cuda
