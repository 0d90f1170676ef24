/** The zone of a kv head: where a key's summary lies, and its score. */
#pragma once

#include "device/divisor.cuh"
#include "policy/pariskv/codec/summary_layout.h"
#include "tables.h"

namespace pariskv::cuda::device {

/** Keys that come in one copy. A multiple of 64, as segments are. */
template <int kWords>
constexpr int kUnitKeys = kWords >= 8 ? 64 : 128;

/** The zone of one head. Positions have at most 23 bits. */
struct Zone {
  uint8_t* const* summaries;  // (segments)
  SummaryLayout layout;
  SegmentDivisor segment;  // of a position
  int head;
  int begin, end;  // positions
  int block_bits;  // of the number of keys that share a mean; 0: none do

  __device__ __forceinline__ int origin() const {
    return begin / int(kScoreAlignment) * int(kScoreAlignment);
  }
  /** The number of the first block of keys that share a mean, from the origin on. */
  __device__ __forceinline__ int first_block() const { return origin() >> block_bits; }
  /** Units of `keys` keys from the origin to the end. */
  __device__ __forceinline__ int units(int keys) const {
    return (end - origin() + keys - 1) / keys;
  }
};

/** Where a key's summary is. */
struct Slot {
  uint8_t* block;
  int slot;
};

/** Segment, and slot in it. */
__device__ __forceinline__ int2 split_position(const Zone& zone, int position) {
  const uint32_t segment = zone.segment(position);
  return make_int2(int(segment), position - int(segment * uint32_t(zone.layout.tokens)));
}

__device__ __forceinline__ Slot slot_of(const Zone& zone, int position) {
  const int2 at = split_position(zone, position);
  return {zone.summaries[at.x], at.y};
}

}  // namespace pariskv::cuda::device
