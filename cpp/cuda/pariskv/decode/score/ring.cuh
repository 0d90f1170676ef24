/**
 * Keys of a zone on their way into shared memory: every warp walks through units of keys of its
 * own, which a ring of copies brings there ahead of it; warps never wait for one another.
 * Definitions are in ring_impl.cuh.
 */
#pragma once

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
  __device__ __forceinline__ void init_barriers() const;

  /** Begins anew, with units [begin, end): `uniform` ones. */
  __device__ __forceinline__ void prime(const Zone& zone, int begin, int end);

  /** The oldest unit, once it is there: signs, then norms. */
  __device__ __forceinline__ uint8_t* take() const;
  /** Done with it: its place is filled anew. */
  __device__ __forceinline__ void release(const Zone& zone);

 private:
  __device__ __forceinline__ void copy_next(const Zone& zone, int stage);
  __device__ __forceinline__ bool find(const Zone& zone, uint8_t* to, uint64_t* barrier);
  __device__ __forceinline__ void copy_pieces(const Zone& zone, int begin, uint8_t* stage,
                                              uint64_t* barrier) const;
};

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
                                          Each each);

}  // namespace pariskv::cuda::device
