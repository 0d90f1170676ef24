/**
 * The coarse scan: one byte per key of the zone, from its sign bits and its norm, with a histogram.
 * Every warp walks through units of keys of its own, which a ring of copies brings to shared memory
 * ahead of it; warps never wait for one another. Equal to cpu/plain/score.cpp bit for bit.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/numbers.cuh"
#include "device/query.cuh"

namespace pariskv::cuda::device {

/** Keys that come in one copy. A multiple of 64, as segments are. */
template <int kWords>
constexpr int kUnitKeys = kWords == 8 ? 64 : 128;
template <int kWords>
constexpr int kUnitSignBytes = kUnitKeys<kWords> * 4 * kWords;
template <int kWords>
constexpr int kUnitBytes = kUnitSignBytes<kWords> + kUnitKeys<kWords>;

/** Most units that a warp has under way. */
constexpr int kMaxStages = 8;

/** Scores are kept from this multiple of positions on, so that they can be moved in words. */
constexpr int kScoreOrigin = 128;

/** The zone of one head. Positions have at most 23 bits. */
struct Zone {
  uint8_t* const* summaries;  // (segments)
  BlockLayout layout;
  int head;
  int begin, end;  // positions

  __device__ __forceinline__ int origin() const { return begin / kScoreOrigin * kScoreOrigin; }
  template <int kWords>
  __device__ __forceinline__ int units() const {
    return (end - origin() + kUnitKeys<kWords> - 1) / kUnitKeys<kWords>;
  }
};

/** Where a key's summary is. */
struct Slot {
  uint8_t* block;
  int slot;
};

/** Segment, and slot in it. */
__device__ __forceinline__ int2 split_position(const Zone& zone, int position) {
  const uint32_t tokens = uint32_t(zone.layout.tokens);
  const uint32_t segment = uint32_t(position) / tokens;
  return make_int2(int(segment), int(uint32_t(position) - segment * tokens));
}

__device__ __forceinline__ Slot slot_of(const Zone& zone, int position) {
  const int2 at = split_position(zone, position);
  return {zone.summaries[at.x], at.y};
}

/** Units [first, end) of one warp, copied ahead into its stages. */
template <int kWords>
struct Ring {
  static constexpr int kKeys = kUnitKeys<kWords>;
  using Copies = WarpCopies<kBulkCopies>;

  uint8_t* stages;     // of this warp
  uint64_t* barriers;  // one per stage
  int count;           // of stages
  int next, end;       // units to be copied
  int fill = 0, read = 0;
  uint32_t parity = 0;
  const uint8_t* signs = nullptr;  // of the next unit
  const uint8_t* norms = nullptr;
  int left = 0;  // units from there on to the end of their segment

  __device__ __forceinline__ void init_barriers() {
    if (lane_id() < count) init_barrier(&barriers[lane_id()], Copies::kArrivals);
    before_copies();
    __syncwarp();
  }

  __device__ __forceinline__ void prime(const Zone& zone, int first, int last) {
    next = first;
    end = last;
    left = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) copy_next(zone);
  }

  __device__ __forceinline__ void copy_next(const Zone& zone) {
    if (next == end) return;
    uint8_t* stage = stages + fill * kUnitBytes<kWords>;
    uint64_t* barrier = &barriers[fill];
    const int position = zone.origin() + next * kKeys;
    if (Copies::takes_part()) {
      if (zone.layout.tokens % kKeys != 0) {
        copy_pieces(zone, position, stage, barrier);
      } else if (position + kKeys > zone.begin) {
        if (left == 0) find(zone, position);
        Copies::expect(barrier, kUnitBytes<kWords>);
        Copies::start(stage, signs, kUnitSignBytes<kWords>, barrier);
        Copies::start(stage + kUnitSignBytes<kWords>, norms, kKeys, barrier);
        signs += kUnitSignBytes<kWords>;
        norms += kKeys;
        --left;
      }
    }
    Copies::finish(barrier);
    ++next;
    if (++fill == count) fill = 0;
  }

  __device__ __forceinline__ void find(const Zone& zone, int position) {
    const Slot at = slot_of(zone, position);
    signs = at.block + zone.layout.signs(zone.head, at.slot);
    norms = at.block + zone.layout.norms(zone.head, at.slot);
    left = (int(zone.layout.tokens) - at.slot) / kKeys;
  }

  /** A unit that may lie across segments. 64 keys never do. */
  __device__ __forceinline__ void copy_pieces(const Zone& zone, int begin, uint8_t* stage,
                                              uint64_t* barrier) const {
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 64) {
      const int position = begin + key;
      if (position + 64 <= zone.begin || position >= zone.end) continue;
      const Slot at = slot_of(zone, position);
      Copies::expect(barrier, 64 * (4 * kWords + 1));
      Copies::start(stage + key * 4 * kWords, at.block + zone.layout.signs(zone.head, at.slot),
                    64 * 4 * kWords, barrier);
      Copies::start(stage + kUnitSignBytes<kWords> + key,
                    at.block + zone.layout.norms(zone.head, at.slot), 64, barrier);
    }
  }

  /** The oldest unit, once it is there: signs, then norms. */
  __device__ __forceinline__ uint8_t* take() {
    wait(&barriers[read], parity);
    return stages + read * kUnitBytes<kWords>;
  }
  /** Done with it: its place is filled anew. */
  __device__ __forceinline__ void release(const Zone& zone) {
    if (++read == count) read = 0, parity ^= 1;
    __syncwarp();
    copy_next(zone);
  }
};

/** Marks the keys of a unit that are not in the zone as unusable. */
template <int kWords>
__device__ __forceinline__ void mask_edges(const Zone& zone, int first, uint8_t* norms) {
  if (first >= zone.begin && first + kUnitKeys<kWords> <= zone.end) return;
  for (int k = lane_id(); k < kUnitKeys<kWords>; k += 32) {
    if (first + k < zone.begin || first + k >= zone.end) norms[k] = 0;
  }
  before_copies();
  __syncwarp();
}

/** Counts of 16 keys against 8 columns: bits set in both, over 128 dimensions. */
__device__ __forceinline__ void count_common(int (&counts)[4], uint32_t a0, uint32_t a1,
                                             uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(counts[0]), "+r"(counts[1]), "+r"(counts[2]), "+r"(counts[3])
      : "r"(a0), "r"(a1), "r"(b));
}

/**
 * Four queries, as a lane needs them: lane 4 g + t holds word t of the planes in column g, that is
 * planes 2 j and 2 j + 1 of query g / 2 in tile j, and the scale of query t.
 */
template <int kWords>
struct QueryTile {
  static constexpr int kSteps128 = kWords == 8 ? 2 : 1;
  uint32_t planes[3][kSteps128];
  float gain, lift, offset;
  int bias;  // turns a sum over positive signs into the bits of 1.5 * 2^23 + dot

  __device__ __forceinline__ void load(const Queries<kWords>& queries, int quad) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int tile = 0; tile < 3; ++tile) {
#pragma unroll
      for (int step = 0; step < kSteps128; ++step) {
        const int word = 4 * step + t;
        planes[tile][step] =
            word < kWords ? queries.planes[4 * quad + g / 2][2 * tile + g % 2][word] : 0;
      }
    }
    gain = queries.gain[4 * quad + t];
    lift = queries.lift[4 * quad + t];
    offset = queries.offset[4 * quad + t];
    bias = 0x4b400000 - queries.sum[4 * quad + t];
  }
};

/** 256 * floor of a score over 256: 0 to 256 in the lower half. Order kept, ends cut. */
template <int kWords>
__device__ __forceinline__ uint32_t scaled(int a, int b, int c, int d, int e,
                                           const QueryTile<kWords>& query, float norm) {
  // Planes to the sum of q over positive signs, twice that less all of q is the dot product. It
  // becomes a float by its bits: conversion instructions are slow.
  const int positive = a + 2 * (b + 2 * (c + 2 * (d - 2 * e)));
  const float dot = float_of(uint32_t(2 * positive + query.bias)) - 12582912.0f;
  float score;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;"
      : "=f"(score)
      : "f"(__fmul_rn(dot, norm)), "f"(query.gain),
        "f"(__fmaf_rn(__fmul_rn(norm, norm), query.lift, query.offset)));
  return bits_of(__fadd_rd(score, 32768.0f));
}

/** The larger of both halves. */
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

/**
 * Four queries against 64 keys, by a warp. Lane 4 g + t gets the scores of keys 16 t + 2 g and
 * 16 t + 2 g + 1, one in each half; for g >= 4 the upper key is in the lower half.
 * @param words  (64, kWords) sign words
 * @param norms  (64)
 */
template <int kWords>
__device__ __forceinline__ uint32_t score_64(const uint32_t* words, const uint8_t* norms,
                                             const QueryTile<kWords>& query) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  // Rows g and g + 8 of a tile are neighbouring keys, so that a lane ends with neighbours; which
  // of them comes first alternates so that no two rows meet in a bank.
  const int first = 2 * g + (g >= 4), second = 2 * g + (g < 4);
  const uint32_t first_code = g < 4 ? 0x4044 : 0x4144, second_code = g < 4 ? 0x4144 : 0x4044;
  uint32_t packed[4];
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
    int counts[3][4] = {};
#pragma unroll
    for (int step = 0; step < QueryTile<kWords>::kSteps128; ++step) {
      const int word = 4 * step + t;
      const uint32_t a0 = word < kWords ? words[(16 * tile + first) * kWords + word] : 0;
      const uint32_t a1 = word < kWords ? words[(16 * tile + second) * kWords + word] : 0;
#pragma unroll
      for (int j = 0; j < 3; ++j) count_common(counts[j], a0, a1, query.planes[j][step]);
    }
    // A norm code, moved to where a float has its exponent, is the norm.
    const uint32_t codes = *reinterpret_cast<const uint16_t*>(norms + 16 * tile + 2 * g);
    constexpr uint32_t kBase = uint32_t(kNormCodeBase) << kNormCodeShift;
    const float norm0 = float_of((__byte_perm(codes, 0, first_code) << 3) + kBase);
    const float norm1 = float_of((__byte_perm(codes, 0, second_code) << 3) + kBase);
    const uint32_t score0 =
        scaled(counts[0][0], counts[0][1], counts[1][0], counts[1][1], counts[2][0], query, norm0);
    const uint32_t score1 =
        scaled(counts[0][2], counts[0][3], counts[1][2], counts[1][3], counts[2][2], query, norm1);
    packed[tile] = __byte_perm(score0, score1, 0x5410);
  }
  // The four lanes of a row hold a query each. In two exchanges lane t ends with the largest of
  // tile t.
  const bool upper = t & 2, odd = t & 1;
  uint32_t keep0 = upper ? packed[2] : packed[0], keep1 = upper ? packed[3] : packed[1];
  const uint32_t give0 = upper ? packed[0] : packed[2], give1 = upper ? packed[1] : packed[3];
  keep0 = larger_halves(keep0, __shfl_xor_sync(~0u, give0, 2));
  keep1 = larger_halves(keep1, __shfl_xor_sync(~0u, give1, 2));
  const uint32_t keep = odd ? keep1 : keep0, give = odd ? keep0 : keep1;
  return larger_halves(keep, __shfl_xor_sync(~0u, give, 1));
}

/** Where the scores of a block go. */
struct ScoreOutput {
  uint8_t* scores;      // from the zone's origin on
  uint32_t* histogram;  // (256) of this warp
  bool earlier;         // scores of earlier searchers are there: the larger one stays
  bool last;            // and these are the last: they are counted
};

/** Units [first, end) of this warp, by signs against the quantised queries of `quads` quads. */
template <int kWords>
__device__ __forceinline__ void score_signs(Ring<kWords>& ring, const Zone& zone, int first,
                                            int end, const Queries<kWords>& queries, int quads,
                                            const ScoreOutput& out) {
  constexpr int kKeys = kUnitKeys<kWords>;
  const int g = lane_id() / 4, t = lane_id() % 4;
  QueryTile<kWords> query;
  query.load(queries, 0);
  for (int unit = first; unit < end; ++unit) {
    uint8_t* stage = ring.take();
    uint8_t* norms = stage + kUnitSignBytes<kWords>;
    mask_edges<kWords>(zone, zone.origin() + unit * kKeys, norms);
#pragma unroll 1
    for (int part = 0; part < kKeys; part += 64) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(stage) + part * kWords;
      uint32_t best = 0x00010001;
#pragma unroll 1
      for (int quad = 0; quad < quads; ++quad) {
        if (quads > 1) query.load(queries, quad);
        best = larger_halves(best, score_64<kWords>(words, norms + part, query));
      }
      best = __vminu2(best, 0x00ff00ff);
      const int key = part + 16 * t + 2 * g;
      const uint32_t codes = *reinterpret_cast<const uint16_t*>(norms + key);
      uint32_t pair = __byte_perm(best, 0, g < 4 ? 0x4420 : 0x4402);
      if ((codes & 0x00ff) == 0) pair &= 0xff00;
      if ((codes & 0xff00) == 0) pair &= 0x00ff;

      const int64_t index = int64_t(unit) * kKeys + key;
      auto* score = reinterpret_cast<uint16_t*>(out.scores + index);
      if (out.earlier) pair = __vmaxu4(pair, *score);
      *score = uint16_t(pair);
      if (out.last) {
        atomicAdd(&out.histogram[pair & 255], 1);
        atomicAdd(&out.histogram[pair >> 8], 1);
      }
    }
    ring.release(zone);
  }
}

/** Sign bytes 4 w to 4 w + 3 of a key looked up in packed tables (subspaces, 256). */
template <typename Entry>
__device__ __forceinline__ uint32_t votes_of(uint32_t word, const Entry* tables, int w) {
  uint32_t sum = 0;
#pragma unroll
  for (int byte = 0; byte < 4; ++byte) {
    sum += tables[(4 * w + byte) * 256 + (word >> 8 * byte & 255)];
  }
  return sum;
}

/**
 * Units [first, end) of this warp, by votes.
 * @param tables  (subspaces, 256): the votes of one searcher, or of four in the bytes of a word.
 *                Sums stay under 256: at most 6 votes in 32 subspaces.
 */
template <int kWords, typename Entry>
__device__ __forceinline__ void score_votes(Ring<kWords>& ring, const Zone& zone, int first,
                                            int end, const Entry* tables, const ScoreOutput& out) {
  constexpr int kKeys = kUnitKeys<kWords>;
  for (int unit = first; unit < end; ++unit) {
    uint8_t* stage = ring.take();
    uint8_t* norms = stage + kUnitSignBytes<kWords>;
    mask_edges<kWords>(zone, zone.origin() + unit * kKeys, norms);
#pragma unroll 2
    for (int key = lane_id(); key < kKeys; key += 32) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(stage) + key * kWords;
      uint32_t sums = 0;
      if constexpr (kWords == 2) {
        const uint2 packed = *reinterpret_cast<const uint2*>(words);
        sums = votes_of(packed.x, tables, 0) + votes_of(packed.y, tables, 1);
      } else {
#pragma unroll
        for (int w = 0; w < kWords; w += 4) {
          const uint4 packed = *reinterpret_cast<const uint4*>(words + w);
          sums += votes_of(packed.x, tables, w) + votes_of(packed.y, tables, w + 1) +
                  votes_of(packed.z, tables, w + 2) + votes_of(packed.w, tables, w + 3);
        }
      }
      if constexpr (sizeof(Entry) == 4) {
        sums = __vmaxu4(sums, sums >> 16);
        sums = __vmaxu4(sums, sums >> 8) & 255;
      }
      uint32_t best = norms[key] == 0 ? 0 : sums + 1;
      const int64_t index = int64_t(unit) * kKeys + key;
      if (out.earlier) best = max(best, uint32_t(out.scores[index]));
      out.scores[index] = uint8_t(best);
      if (out.last) atomicAdd(&out.histogram[best], 1);
    }
    ring.release(zone);
  }
}

/** Votes of one searcher. */
template <int kWords>
__device__ __forceinline__ void copy_votes(const uint8_t* votes, int searcher, uint8_t* tables) {
  constexpr int kEntries = 4 * kWords * 256;
  const auto* from = reinterpret_cast<const uint32_t*>(votes + int64_t(searcher) * kEntries);
  for (int i = threadIdx.x; i < kEntries / 4; i += kThreads) {
    reinterpret_cast<uint32_t*>(tables)[i] = __ldcg(from + i);
  }
}

/**
 * Votes of searchers [first, first + 4), packed into the bytes of words; missing ones are zero.
 * @param votes   (searchers, subspaces, 256) of the head
 * @param tables  (subspaces, 256)
 */
template <int kWords>
__device__ __forceinline__ void pack_votes(const uint8_t* votes, int first, int searchers,
                                           uint32_t* tables) {
  constexpr int kEntries = 4 * kWords * 256;
  for (int i = threadIdx.x; i < kEntries / 4; i += kThreads) {
    uint32_t of[4];  // votes of four centroids, by searcher
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      of[h] = 0;
      if (first + h < searchers) {
        of[h] =
            __ldcg(reinterpret_cast<const uint32_t*>(votes + int64_t(first + h) * kEntries) + i);
      }
    }
    const uint32_t ab = __byte_perm(of[0], of[1], 0x5140), cd = __byte_perm(of[2], of[3], 0x5140);
    const uint32_t ef = __byte_perm(of[0], of[1], 0x7362), gh = __byte_perm(of[2], of[3], 0x7362);
    reinterpret_cast<uint4*>(tables)[i] =
        make_uint4(__byte_perm(ab, cd, 0x5410), __byte_perm(ab, cd, 0x7632),
                   __byte_perm(ef, gh, 0x5410), __byte_perm(ef, gh, 0x7632));
  }
}

}  // namespace pariskv::cuda::device
