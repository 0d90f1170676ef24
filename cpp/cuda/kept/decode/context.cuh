/** The kv head of a block of a step over kept rows, and where its rows lie. */
#pragma once

#include "device/attend_shape.cuh"
#include "device/partition.cuh"
#include "kept/blocks.cuh"
#include "kept/decode/params.h"

namespace pariskv::cuda {

/** Rows that a block looks at in one step: a part has as many, or a few times as many. */
constexpr int kStepRows = 64;
/** Parts of a head at most. More of them would be more for the next kernel to read. */
constexpr int kMostParts = 32;

/**
 * How the rows that a head attends to are cut, for sums that the next kernel puts together: from
 * their number alone, so that a result does not depend on the batch.
 */
struct HeadParts {
  int rows;
  int each;  // rows of a part; the last one has the rest
  int count;

  __device__ __forceinline__ static HeadParts of(int rows) {
    const int steps = max((rows + kStepRows * kMostParts - 1) / (kStepRows * kMostParts), 1);
    const int each = kStepRows * steps;
    return {rows, each, (rows + each - 1) / each};
  }
  __device__ __forceinline__ int begin(int part) const { return min(part * each, rows); }
};

/** Whether rows go straight to the tensor cores. */
template <typename Element>
constexpr bool kKeptDirect = sizeof(Element) == 2;
/** The rows of a head of float32 come in up to so many segments, and a segment in kParts parts. */
constexpr int kSegments = 2;
static_assert(kSegments * device::kParts <= kMostParts);

/** Read from device memory once. */
struct KeptContext {
  int row, head;  // of the batch; kv head
  void* const* rows;
  char* recent;
  const char* kept;  // rows that are kept, side by side
  int kept_rows;
  int total;
  int before, gap;  // resident rows before the zone; rows of the zone that are left out
  float* parts;     // (kMostParts, group, 2 + value_dim), as PartsInScratch
  device::AttendShape shape;

  /** Rows that are attended to. */
  __device__ __forceinline__ int count() const { return total - gap + kept_rows; }
  /** Of them, see kSegments. */
  __device__ __forceinline__ int segments() const { return count() > 1024 ? kSegments : 1; }
  /** Parts that are left for the next kernel. */
  template <typename Element>
  __device__ __forceinline__ int part_count() const {
    if constexpr (kKeptDirect<Element>) return HeadParts::of(count()).count;
    return segments() * device::kParts;
  }
  /** The parts of a segment. */
  __device__ __forceinline__ float* parts_of(int segment) const {
    return parts + int64_t(segment) * device::kParts * shape.group * (2 + shape.value_dim);
  }
};

/** False when the slot is idle. By one thread. */
__device__ __forceinline__ bool find_kept(const KeptStepParams& params, int index,
                                          KeptContext& context) {
  const KeptDecodeCall& call = params.call;
  const int row = int(params.by_kv_heads(index));
  const KeptSlot& slot = call.slots[row];
  const SequenceView* layers = slot.layers;
  if (layers == nullptr) return false;
  const SequenceView view = layers[call.layer];  // all of it at once
  const ModelShape& model = call.shape;
  const int head = index - row * int(model.kv_heads);
  context.row = row;
  context.head = head;
  context.rows = view.rows;
  context.recent = view[Part::kRecent];
  const device::KeptHead kept{view[Part::kKept], model.kept(view.kept_capacity), head};
  context.kept = kept.row(0);
  context.total = int(view.total);
  context.before = int(view.zone_begin);
  context.gap = view.dense() ? 0 : int(view.zone_end - view.zone_begin);
  context.kept_rows = context.gap > 0 && view[Part::kKept] != nullptr ? kept.counts()[0] : 0;
  context.parts = reinterpret_cast<float*>(slot.scratch + head * slot.head_bytes);
  context.shape = {int(model.rows.key_dim), int(model.rows.value_dim), int(model.group),
                   int(model.rows.bytes()), int(model.rows.bytes()),   call.logits.scale,
                   call.logits.softcap};
  return true;
}

}  // namespace pariskv::cuda
