/** Definitions of ring.cuh. */
#pragma once

#include "device/copy.cuh"
#include "pariskv/decode/score/ring.cuh"

namespace pariskv::cuda::device {

using UnitCopies = WarpCopies<kBulkCopies>;

template <int kWords>
__device__ __forceinline__ void Ring<kWords>::init_barriers() const {
  if (lane_id() < kStages<kWords>) ptx::mbarrier_init(&barriers[lane_id()], UnitCopies::kArrivals);
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

template <int kWords>
__device__ __forceinline__ void Ring<kWords>::prime(const Zone& zone, int begin, int end) {
  straight = 0;
  next = begin;
  last = end;
  segment = -1;
#pragma unroll 1
  for (int i = 0; i < kStages<kWords>; ++i) {
    const int stage = read + i;
    copy_next(zone, stage < kStages<kWords> ? stage : stage - kStages<kWords>);
  }
}

/** Sets the next unit on its way, if there is one. */
template <int kWords>
__device__ __forceinline__ void Ring<kWords>::copy_next(const Zone& zone, int stage) {
  uint8_t* to = stages + stage * kUnitBytes<kWords>;
  uint64_t* barrier = &barriers[stage];
  if (straight == 0 && !find(zone, to, barrier)) return;
  --straight;
  if (UnitCopies::takes_part()) {
    UnitCopies::expect_all(barrier, kUnitBytes<kWords>);
    UnitCopies::stream(to, signs, kUnitSignBytes<kWords>, barrier);
    UnitCopies::stream(to + kUnitSignBytes<kWords>, norms, kKeys, barrier);
  }
  if (!kBulkCopies) UnitCopies::finish(barrier);
  signs += kUnitSignBytes<kWords>;
  norms += kKeys;
}

/**
 * Goes on to the next segment, whose block was looked up when the one before was begun; returns
 * whether units come straight from it. If not, the next unit has been seen to, or there is none.
 */
template <int kWords>
__device__ __forceinline__ bool Ring<kWords>::find(const Zone& zone, uint8_t* to,
                                                   uint64_t* barrier) {
  if (next == last) return false;
  const int tokens = int(zone.layout.tokens), position = zone.origin() + next * kKeys;
  const bool across = uint32_t(tokens) % kKeys != 0;
  if (across || position + kKeys <= zone.begin) {
    if (across) copy_pieces(zone, position, to, barrier);
    UnitCopies::finish(barrier);
    ++next;
    return false;
  }
  int slot = 0;
  const uint8_t* block = upcoming;
  if (segment < 0) {
    const int2 at = split_position(zone, position);
    segment = at.x;
    slot = at.y;
    block = zone.summaries[segment];
  } else {
    ++segment;
  }
  signs = uniform(block + zone.layout.signs_at(zone.head, slot));
  norms = uniform(block + zone.layout.norms_at(zone.head, slot));
  straight = uniform(min((tokens - slot) / kKeys, last - next));
  next += straight;
  if (position - slot + tokens < zone.end) upcoming = zone.summaries[segment + 1];
  return true;
}

/** A unit that may lie across segments. 64 keys never do. */
template <int kWords>
__device__ __forceinline__ void Ring<kWords>::copy_pieces(const Zone& zone, int begin,
                                                          uint8_t* stage, uint64_t* barrier) const {
  if (!UnitCopies::takes_part()) return;
#pragma unroll 1
  for (int key = 0; key < kKeys; key += 64) {
    const int position = begin + key;
    if (position + 64 <= zone.begin || position >= zone.end) continue;
    const Slot at = slot_of(zone, position);
    UnitCopies::expect(barrier, 64 * (4 * kWords + 1));
    UnitCopies::start(stage + key * 4 * kWords, at.block + zone.layout.signs_at(zone.head, at.slot),
                      64 * 4 * kWords, barrier);
    UnitCopies::start(stage + kUnitSignBytes<kWords> + key,
                      at.block + zone.layout.norms_at(zone.head, at.slot), 64, barrier);
  }
}

template <int kWords>
__device__ __forceinline__ uint8_t* Ring<kWords>::take() const {
  wait(&barriers[read], parity);
  return stages + read * kUnitBytes<kWords>;
}

template <int kWords>
__device__ __forceinline__ void Ring<kWords>::release(const Zone& zone) {
  __syncwarp();
  copy_next(zone, read);
  if (++read == kStages<kWords>) read = 0, parity ^= 1;
}

/** Marks the keys of a unit that are not in the zone as unusable. */
template <int kWords>
__device__ __forceinline__ void mask_edges(const Zone& zone, int unit, uint8_t* norms) {
  const int first = zone.origin() + unit * kUnitKeys<kWords>;
  for (int k = lane_id(); k < kUnitKeys<kWords>; k += 32) {
    if (first + k < zone.begin || first + k >= zone.end) norms[k] = 0;
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

template <int kWords, typename Each>
__device__ __forceinline__ void for_units(Ring<kWords>& ring, const Zone& zone, int first, int end,
                                          Each each) {
  constexpr int kKeys = kUnitKeys<kWords>;
  const int whole_first = (zone.begin - zone.origin() + kKeys - 1) / kKeys;
  const int whole_end = (zone.end - zone.origin()) / kKeys;
#pragma unroll 1
  for (int unit = first; unit < end; ++unit) {
    uint8_t* stage = ring.take();
    if (unit < whole_first || unit >= whole_end) {
      mask_edges<kWords>(zone, unit, stage + kUnitSignBytes<kWords>);
    }
    each(unit, stage, [&] { ring.release(zone); });
  }
}

}  // namespace pariskv::cuda::device
