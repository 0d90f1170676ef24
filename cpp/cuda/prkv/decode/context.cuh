/** What a block of a step over pages works on: its kv head, its pages, its part of the scratch. */
#pragma once

#include "device/attend_shape.cuh"
#include "device/signal.cuh"
#include "prkv/blocks.cuh"
#include "prkv/decode/params.h"

namespace pariskv::cuda {

/** Read from device memory once. */
struct PageContext {
  int row, head;  // of the batch; kv head
  void* const* rows;
  uint8_t* const* summaries;
  char* kept;  // a block of kept rows, with its amended pages; null: there is none
  int64_t kept_capacity;
  int first_page, pages;  // of the zone; none where no page is looked for
  int64_t capacity;       // of the scratch, in pages
  char* scratch;          // of this head
  device::AttendShape shape;
};

/** Its amended pages, where there is a block of kept rows. */
__device__ __forceinline__ device::AmendedHead amended_pages(const ModelShape& shape,
                                                             const PageContext& context) {
  return {context.kept, amended_of(shape, context.kept_capacity), context.head};
}

/** The arrays of a head whose scratch begins at `base`. */
__device__ __forceinline__ PageScratch page_scratch(const PageScratchLayout& layout, char* base,
                                                    int64_t capacity) {
  return {reinterpret_cast<float*>(base),
          reinterpret_cast<float*>(base + layout.fetched),
          reinterpret_cast<PageSearch*>(base + layout.search),
          reinterpret_cast<float*>(base + layout.scores),
          reinterpret_cast<uint64_t*>(base + layout.live(capacity)),
          reinterpret_cast<FoundPage*>(base + layout.found(capacity)),
          reinterpret_cast<device::SelectedRow*>(base + layout.rows(capacity))};
}
/** Where that is. */
__device__ __forceinline__ char* scratch_of(const KeptSlot& slot, int head) {
  return slot.scratch + head * slot.head_bytes;
}

/**
 * False when the slot is idle. By one thread.
 * @param also  also(view), with all that is known of the layer
 */
template <typename Also>
__device__ __forceinline__ bool find_pages_context(const PageStepParams& params, int index,
                                                   PageContext& context, Also also) {
  const PageDecodeCall& call = params.call;
  const int row = int(params.by_kv_heads(index));
  const KeptSlot& slot = call.slots[row];
  const SequenceView* layers = slot.layers;
  if (layers == nullptr) return false;
  const SequenceView view = layers[call.layer];  // all of it at once
  const ModelShape& model = call.shape;
  const int page = int(call.rules.page);
  context.row = row;
  context.head = index - row * int(model.kv_heads);
  context.rows = view.rows;
  context.summaries = view.summaries;
  context.kept = view[Part::kKept];
  context.kept_capacity = view.kept_capacity;
  context.first_page = int(view.zone_begin) / page;
  context.pages = view.dense() ? 0 : (int(view.zone_end) - 1) / page + 1 - context.first_page;
  context.capacity = slot.page_capacity;
  context.scratch = scratch_of(slot, context.head);
  context.shape = {int(model.rows.key_dim), int(model.rows.value_dim), int(model.group),
                   int(model.rows.bytes()), int(model.rows.bytes()),   call.logits.scale,
                   call.logits.softcap};
  also(view);
  return true;
}

}  // namespace pariskv::cuda
