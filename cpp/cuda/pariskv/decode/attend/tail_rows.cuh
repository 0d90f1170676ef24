/**
 * The rows that stand for what is not selected (tail.h): attended to while selected rows are on
 * their way. All of them count, and a selected one among them makes up for its second time: then
 * no block has to know which rows the others select.
 */
#pragma once

#include "device/attend.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/row_address.cuh"
#include "tail.h"

namespace pariskv::cuda {

/** Shared memory for tiles of them. */
constexpr int kTailBytes = 2 * device::kTileBytes;

/** The tail of a step that selects at most `wanted` rows: none where these are all of the zone. */
__device__ __forceinline__ Tail tail_of(const device::Zone& zone, int64_t rows, int wanted) {
  return Tail::of(zone.begin, zone.end, wanted < zone.end - zone.begin ? rows : 0);
}
/** How many keys each row stands for. */
__device__ __forceinline__ float weight_of(const device::Zone& zone, const Tail& tail) {
  return __fdiv_rn(float(zone.end - zone.begin), float(tail.count));
}

/** Where they lie. */
struct TailRows {
  static constexpr bool kSkipsBroken = true;
  const HeadContext& context;
  const Tail& tail;
  int capacity;  // of kept rows, of a head
  float each;

  __device__ __forceinline__ float weight(int) const { return each; }
  __device__ __forceinline__ const char* operator()(int i) const {
    if (context.kept == nullptr) return row_at(context, int(tail.position(i)));
    return context.kept + (int64_t(context.head) * capacity + i) * context.shape.row_bytes;
  }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

}  // namespace pariskv::cuda
