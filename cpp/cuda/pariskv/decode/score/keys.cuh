/**
 * Keys of a zone on their way into shared memory: every warp walks through units of keys of its
 * own, which a ring of copies brings there ahead of it; warps never wait for one another.
 */
#pragma once

#include "device/copy.cuh"
#include "device/partition.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/flags.cuh"
#include "pariskv/decode/sums.cuh"
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

using UnitCopies = WarpCopies<kBulkCopies>;

/**
 * Units of one warp, copied ahead into its stages. All of this is the same in all lanes, and the
 * compiler knows it of the addresses of copies: else it would loop over the lanes for each copy.
 */
template <int kWords>
struct Ring {
  static constexpr int kKeys = kUnitKeys<kWords>;

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

  /** By all lanes of a warp. */
  __device__ __forceinline__ void init_barriers() const {
    if (lane_id() < kStages<kWords>)
      ptx::mbarrier_init(&barriers[lane_id()], UnitCopies::kArrivals);
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

 private:
  /** Sets the next unit on its way, if there is one. */
  __device__ __forceinline__ void copy_next(const Zone& zone, int stage) {
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
  __device__ __forceinline__ bool find(const Zone& zone, uint8_t* to, uint64_t* barrier) {
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
  __device__ __forceinline__ void copy_pieces(const Zone& zone, int begin, uint8_t* stage,
                                              uint64_t* barrier) const {
    if (!UnitCopies::takes_part()) return;
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 64) {
      const int position = begin + key;
      if (position + 64 <= zone.begin || position >= zone.end) continue;
      const Slot at = slot_of(zone, position);
      UnitCopies::expect(barrier, 64 * (4 * kWords + 1));
      UnitCopies::start(stage + key * 4 * kWords,
                        at.block + zone.layout.signs_at(zone.head, at.slot), 64 * 4 * kWords,
                        barrier);
      UnitCopies::start(stage + kUnitSignBytes<kWords> + key,
                        at.block + zone.layout.norms_at(zone.head, at.slot), 64, barrier);
    }
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

namespace pariskv::cuda {

namespace device {

/** Turns histograms of all warps into counts; they are overwritten. */
__device__ __forceinline__ void write_counts(uint32_t (&histograms)[kWarps][256],
                                             ScoreCounts* out) {
  auto* mine = reinterpret_cast<int4*>(&histograms[warp_id()][8 * lane_id()]);
  const int4 low = mine[0], high = mine[1];
  int of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 6; i >= 0; --i) of[i] += of[i + 1];
  const int higher = __reduce_add_sync(~0u, of[0]) - lanes_before(of[0]) - of[0];
#pragma unroll
  for (int i = 0; i < 8; ++i) of[i] += higher;
  auto* to = reinterpret_cast<int4*>(&out->of_warps[warp_id()][8 * lane_id()]);
  to[0] = mine[0] = make_int4(of[0], of[1], of[2], of[3]);
  to[1] = mine[1] = make_int4(of[4], of[5], of[6], of[7]);
  __syncthreads();
  static_assert(kThreads == 256);
  const int bin = int(threadIdx.x);
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += int(histograms[warp][bin]);
  out->at_least[bin] = sum;
  if (bin % kFine == 0) out->coarse[bin / kFine] = sum;
}

}  // namespace device

/** In shared memory; stages of all warps come besides. */
template <int kWords>
struct ShareSpace {
  uint64_t barriers[device::kWarps][device::kStages<kWords>];
  alignas(16) uint32_t histogram[device::kWarps][256];

  static constexpr int kWarpBytes = device::kStages<kWords> * device::kUnitBytes<kWords>;
  static constexpr int kStageBytes = device::kWarps * kWarpBytes;

  /** All threads; to be followed by a barrier. */
  __device__ __forceinline__ void clear() {
    static_assert(device::kThreads == 256);
#pragma unroll
    for (auto& counts : histogram) counts[threadIdx.x] = 0;
  }
};

/** A block's share of a head's zone, cut into units of its warps: by signs and by votes alike. */
template <int kWords>
struct Share {
  const HeadContext& context;
  ShareSpace<kWords>& space;
  int begin, end;  // units of this warp
  device::Ring<kWords> ring;

  /** Of block `rank` of `blocks`; the first units set out. */
  __device__ __forceinline__ Share(const HeadContext& of, ShareSpace<kWords>& shared,
                                   uint8_t* stages, int rank, int blocks)
      : context(of), space(shared) {
    const int units = of.zone.units(device::kUnitKeys<kWords>);
    const int first = device::share_begin(units, rank, blocks);
    const int count = device::share_begin(units, rank + 1, blocks) - first;
    const int warp = device::held_warp();
    begin = device::uniform(first + device::warp_begin(count, warp));
    end = device::uniform(first + device::warp_begin(count, warp + 1));
    ring = {stages + warp * ShareSpace<kWords>::kWarpBytes, shared.barriers[warp]};
    ring.init_barriers();
    ring.prime(of.zone, begin, end);
  }

  /** Another round through the same units. All threads. */
  __device__ __forceinline__ void begin_again() {
    __syncthreads();
    ring.prime(context.zone, begin, end);
  }

  /** Where the scores of a round of `step` searchers go. */
  __device__ __forceinline__ device::ScoreOutput output(int from, int step, int searchers) const {
    return {context.scratch.scores, space.histogram[device::held_warp()], from > 0,
            from + step >= searchers};
  }

  /** All scores are written: counts, and the block's flag. All threads. */
  __device__ __forceinline__ void finish(int rank, uint32_t token) const {
    __syncwarp();
    device::write_counts(space.histogram, context.scratch.counts + rank);
    ReadyFlags{context.scratch.flags}.set(ReadyFlags::kScored + rank, token);
    device::wait_for_predecessor();
  }
};

}  // namespace pariskv::cuda
