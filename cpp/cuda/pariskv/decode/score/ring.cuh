/**
 * Keys of a zone on their way into shared memory: every warp walks through units of keys of its
 * own, which a ring of copies brings there ahead of it; warps never wait for one another.
 */
#pragma once

#include "device/copy.cuh"
#include "device/partition.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/zone.cuh"

namespace pariskv::cuda::device {

template <int kWords>
constexpr int kUnitSignBytes = kUnitKeys<kWords> * 4 * kWords;
template <int kWords>
constexpr int kUnitBytes = kUnitSignBytes<kWords> + kUnitKeys<kWords>;

/** Units of a warp that are under way or looked at: two blocks fit beside one that reranks. With
 * 512 dimensions there is room for one. */
template <int kWords>
constexpr int kStages = kWords == 2    ? 4
                        : kWords == 16 ? 1
                                       : 2;

/**
 * Units of one warp, copied ahead into its stages. All of this is the same in all lanes, and the
 * compiler knows it of what is copied from where: else it would go through the lanes for each copy.
 */
template <int kWords>
struct Ring {
  static constexpr int kKeys = kUnitKeys<kWords>;
  using Copies = WarpCopies<kBulkCopies>;

  uint8_t* stages;     // of this warp
  uint64_t* barriers;  // one per stage
  int read = 0;        // the stage whose turn it is
  uint32_t parity = 0;
  const uint8_t* signs = nullptr;     // of the unit to be copied next, if it comes straight from
  const uint8_t* norms = nullptr;     // a segment
  int straight = 0;                   // units that do
  int next = 0, last = 0;             // units after those
  int segment = -1;                   // -1: none yet
  const uint8_t* upcoming = nullptr;  // the block of the next segment

  __device__ __forceinline__ void init_barriers() const {
    if (lane_id() < kStages<kWords>) ptx::mbarrier_init(&barriers[lane_id()], Copies::kArrivals);
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  /** Begins anew, with units [begin, end): `uniform` ones. */
  __device__ __forceinline__ void prime(const Zone& zone, int begin, int end) {
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
  __device__ __forceinline__ void copy_next(const Zone& zone, int stage) {
    uint8_t* to = stages + stage * kUnitBytes<kWords>;
    uint64_t* barrier = &barriers[stage];
    if (straight == 0 && !find(zone, to, barrier)) return;
    --straight;
    if (Copies::takes_part()) {
      Copies::expect_all(barrier, kUnitBytes<kWords>);
      Copies::stream(to, signs, kUnitSignBytes<kWords>, barrier);
      Copies::stream(to + kUnitSignBytes<kWords>, norms, kKeys, barrier);
    }
    if (!kBulkCopies) Copies::finish(barrier);
    signs += kUnitSignBytes<kWords>;
    norms += kKeys;
  }

  /**
   * Goes on to the next segment, whose block was looked up when the one before was begun; returns
   * whether units come straight from it. If not, the next unit has been seen to, or there is none.
   */
  __device__ __forceinline__ bool find(const Zone& zone, uint8_t* to, uint64_t* barrier) {
    if (next == last) return false;
    const int tokens = int(zone.layout.tokens), position = zone.origin() + next * kKeys;
    const bool across = uint32_t(tokens) % kKeys != 0;
    if (across || position + kKeys <= zone.begin) {
      if (across) copy_pieces(zone, position, to, barrier);
      Copies::finish(barrier);
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
  __device__ __forceinline__ void copy_pieces(const Zone& zone, int begin, uint8_t* stage,
                                              uint64_t* barrier) const {
    if (!Copies::takes_part()) return;
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 64) {
      const int position = begin + key;
      if (position + 64 <= zone.begin || position >= zone.end) continue;
      const Slot at = slot_of(zone, position);
      Copies::expect(barrier, 64 * (4 * kWords + 1));
      Copies::start(stage + key * 4 * kWords, at.block + zone.layout.signs_at(zone.head, at.slot),
                    64 * 4 * kWords, barrier);
      Copies::start(stage + kUnitSignBytes<kWords> + key,
                    at.block + zone.layout.norms_at(zone.head, at.slot), 64, barrier);
    }
  }

  /** The oldest unit, once it is there: signs, then norms. */
  __device__ __forceinline__ uint8_t* take() const {
    wait(&barriers[read], parity);
    return stages + read * kUnitBytes<kWords>;
  }
  /** Done with it: its place is filled anew. */
  __device__ __forceinline__ void release(const Zone& zone) {
    __syncwarp();
    copy_next(zone, read);
    if (++read == kStages<kWords>) read = 0, parity ^= 1;
  }
};

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

/** Where the scores of a block go. */
struct ScoreOutput {
  uint8_t* scores;      // from the zone's origin on
  uint32_t* histogram;  // (256) of this warp
  bool earlier;         // scores of earlier searchers are there: the larger one stays
  bool last;            // and these are the last: they are counted

  /** Counts a score by the offset of its place in the histogram. */
  __device__ __forceinline__ void count(uint32_t offset) const {
    atomicAdd(reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(histogram) + offset), 1);
  }
  /** Counts two scores, one in each half. */
  __device__ __forceinline__ void count_pair(uint32_t halves) const {
    count(halves << 2 & 0x3fc);
    count(halves >> 14);
  }
};

/**
 * Calls `each(unit, stage, release)` for units [first, end) of a warp, which calls release() when
 * it has read the stage, so that the next unit sets out for it. Keys out of the zone have norm 0.
 */
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
