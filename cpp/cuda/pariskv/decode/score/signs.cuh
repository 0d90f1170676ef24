/**
 * The coarse score by signs: one byte per key of the zone, from its sign bits and its norm, with a
 * histogram. Equal to cpu/plain/score.cpp bit for bit.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/score/keys.cuh"
#include "pariskv/decode/score/queries.cuh"

namespace pariskv::cuda::device {

// The arrangement. A tile is 16 rows of a matrix product, each with the bits of two keys side by
// side; columns 0 to 3 hold a plane of four queries against the first of them, columns 4 to 7
// against the second, and zeros against the other. So lane 4 g + t gets sums of two queries,
// 2 (t % 2) and the next, for key t / 2 of rows g and g + 8: what it makes of a norm serves twice,
// and four queries are joined by one exchange. 64 keys are two tiles; lanes 4 g to 4 g + 3
// work on keys 8 g to 8 g + 7. Which of them is in which row is turned by g, so that eight rows
// that are loaded together lie in different banks.

/** Sums of bits set in both, of 16 rows against 8 columns: 128 bits, or 256. */
__device__ __forceinline__ void count_common(int (&counts)[4], const uint32_t (&a)[2],
                                             const uint32_t (&b)[1]) {
  ptx::mma_m16n8k128_b1_and_popc(counts, a, b);
}

__device__ __forceinline__ void count_common(int (&counts)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  ptx::mma_m16n8k256_b1_and_popc(counts, a, b);
}

/** Four queries, as a lane needs them. */
template <int kWords>
struct QueryTile {
  static constexpr int kSteps =
      kWords <= 4 ? 1 : kWords / 4;  // products of 256 bits, or one of 128
  static constexpr int kRegisters = kWords == 2 ? 1 : 2;
  uint32_t planes[kPlanes][kSteps][kRegisters];  // column g
  float gain[2], variance_term[2], offset[2];    // of its two queries
  int bias[2];       // turns a sum over positive signs into the bits of 1.5 * 2^23 + dot
  float octave;      // over 256
  uint32_t octaves;  // whole, in halves

  __device__ __forceinline__ void load(const Queries<kWords>& queries, int quad) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t* words = queries.planes[4 * quad + g % 4][plane];
      if constexpr (kWords == 2) {
        planes[plane][0][0] = g / 4 == t / 2 ? words[t % 2] : 0;
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          planes[plane][step][0] = g < 4 ? words[4 * step + t] : 0;
          planes[plane][step][1] = g < 4 ? 0 : words[4 * step + t];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int searcher = 4 * quad + 2 * (t % 2) + i;
      gain[i] = queries.gain[searcher];
      variance_term[i] = queries.variance_term[searcher];
      offset[i] = queries.offset[searcher];
      bias[i] = 0x4b400000 - queries.sum[searcher];
    }
    octaves = uint32_t(queries.octave) * 0x00010001;
    octave = float(queries.octave) * 0x1p-8f;
  }
};

/** Logits of means, of a lane's two queries of the first quad. */
struct LaneSteps {
  const int2* steps;
  int pitch;  // from block to block, in pairs
  int bits;   // of the number of keys of a block
  int skew;   // keys of the first block before the zone's origin

  __device__ __forceinline__ LaneSteps(const BlockSteps& blocks, int origin)
      : steps(reinterpret_cast<const int2*>(blocks.steps) + lane_id() % 2),
        pitch(blocks.pitch / 2),
        bits(blocks.bits),
        skew(origin - (blocks.first << blocks.bits)) {}

  /** @param key  from the zone's origin on */
  __device__ __forceinline__ const int2* at(int key) const {
    return steps + ((skew + key) >> bits) * pitch;
  }
};

/**
 * The first terms of the scores of a unit's keys, for a lane's two queries of one quad: by 64 keys.
 * The terms of the next unit are read ahead.
 */
template <int kWords, bool kBlocks>
struct UnitOffsets {
  static constexpr int kParts = kBlocks ? kUnitKeys<kWords> / 64 : 1;
  int2 steps[kParts];

  /** By its bits, since conversions are slow; there are less than 2^22 steps. */
  static __device__ __forceinline__ float whole(int steps) {
    return __fsub_rn(float_of(uint32_t(steps + 0x4b400000)), 12582912.0f);
  }
  /** @param first  of the unit's keys, from the zone's origin on */
  __device__ __forceinline__ void read(const LaneSteps& of, int first, int quad) {
    if constexpr (kBlocks) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        steps[part] = __ldcg(of.at(first + 64 * part) + 2 * quad);
      }
    }
  }
  __device__ __forceinline__ void set(int part, const Queries<kWords>& queries, int quad,
                                      QueryTile<kWords>& query) const {
    if constexpr (kBlocks) {
      const int searcher = 4 * quad + 2 * (lane_id() % 2);
      const float2 per_step = *reinterpret_cast<const float2*>(&queries.per_step[searcher]);
      const float2 offset = *reinterpret_cast<const float2*>(&queries.offset[searcher]);
      query.offset[0] = __fmaf_rn(whole(steps[part].x), per_step.x, offset.x);
      query.offset[1] = __fmaf_rn(whole(steps[part].y), per_step.y, offset.y);
    }
  }
};

/** Where a lane finds its keys among 64. */
template <int kWords>
struct LanePlan {
  uint32_t row;       // bytes to the row whose address it gives for the first tile
  int norms;          // keys 8 g and on
  uint32_t own;       // selects its four norm codes of the eight: 2 tile + row / 8
  uint32_t own_keys;  // selects two of those, into halves: of the keys whose scores it ends with
  uint32_t ordered;   // selects these scores by position
  int key;            // the first of their positions
  bool odd;

  __device__ __forceinline__ LanePlan() {
    const int lane = held_lane(), g = lane / 4, t = lane % 4;
    const int i = lane % 8, matrix = lane / 8;  // that it loads
    if constexpr (kWords == 2) {
      row = 16 * (4 * i + ((2 * (matrix % 2) + matrix / 2) ^ (i / 2)));
    } else {
      row = 4 * kWords * (8 * i + ((4 * (matrix / 2) + matrix % 2) ^ i));
    }
    norms = 8 * g;
    own = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int tile = j / 2, half = j % 2;
      const int code = kWords == 2 ? 2 * ((2 * half + tile) ^ (g / 2)) + t / 2
                                   : (4 * (t / 2) + 2 * tile + half) ^ g;
      own |= uint32_t(code) << 4 * j;
    }
    odd = t % 2;
    own_keys = odd ? 0x4342 : 0x4140;
    if constexpr (kWords == 2) {
      ordered = t < 2 ? 0x5410 : 0x3276;
    } else {
      ordered = g % 2 == 0 ? 0x4420 : 0x4402;
    }
    key = 8 * g + 2 * (t ^ (g / 2));
  }
};

/** joined_score in halves, of up to 15 bits each: without its limit of 255. */
__device__ __forceinline__ uint32_t joined_halves(uint32_t a, uint32_t b, uint32_t octaves) {
  const uint32_t mean = ((a + b + 0x00010001) >> 1) & 0x7fff7fff;
  return __vmaxu2(__vmaxu2(a, b), mean + octaves);
}

/** The same of floats that are 32768 more than a score over 256. */
__device__ __forceinline__ float joined_floats(float a, float b, float octave) {
  const float mean = __fmaf_ru(a, 0.5f, __fmaf_rn(b, 0.5f, octave));
  return fmaxf(fmaxf(a, b), mean);
}

/** A query's score of a key over 256, from 0 to 1: in the same order, ends cut. */
__device__ __forceinline__ float scored(int positive, float gain, float variance_term, float offset,
                                        int bias, float norm) {
  // Twice the sum over positive signs less all of q is the dot product. It becomes a float by its
  // bits, conversion instructions are slow; the product with the norm is exact.
  const float dot =
      __fmaf_rn(float_of(uint32_t(2 * positive + bias)), norm, __fmul_rn(norm, -12582912.0f));
  return ptx::fma_rn_sat(dot, gain, __fmaf_rn(__fmul_rn(norm, norm), variance_term, offset));
}

/** The sign words of 64 keys, as the lanes of a warp need them: of two tiles. */
template <int kWords>
struct SignTiles {
  static constexpr int kSteps = QueryTile<kWords>::kSteps;
  uint32_t rows[2][kSteps][kWords == 2 ? 2 : 4];

  /** @param words  shared address of (64, kWords) of them */
  __device__ __forceinline__ void load(uint32_t words, const LanePlan<kWords>& plan) {
    if constexpr (kWords == 2) {
      uint32_t both[4];
      ptx::ldmatrix_x4(both, words + plan.row);
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i / 2][0][i % 2] = both[i];
    } else {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          ptx::ldmatrix_x4(rows[tile][step], words + (plan.row ^ (8 * kWords * tile)) + 16 * step);
        }
      }
    }
  }
};

/**
 * Four queries against 64 keys, by a warp: the joined scores of both keys that a lane ends with, in
 * halves.
 * @param codes  the lane's own four norm codes
 */
template <int kWords>
__device__ __forceinline__ uint32_t score_64(const SignTiles<kWords>& keys, uint32_t codes,
                                             const LanePlan<kWords>& plan,
                                             const QueryTile<kWords>& query) {
  uint32_t joined[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    // Of two planes in one sum the upper one is added twice: products cost less than arithmetic.
    int low[4] = {}, high[4] = {}, sign[4] = {};
    const auto multiply = [&](const auto& rows, int step) {
      count_common(low, rows, query.planes[1][step]);
      count_common(high, rows, query.planes[3][step]);
      count_common(sign, rows, query.planes[4][step]);
      count_common(low, rows, query.planes[1][step]);
      count_common(high, rows, query.planes[3][step]);
      count_common(low, rows, query.planes[0][step]);
      count_common(high, rows, query.planes[2][step]);
    };
#pragma unroll
    for (int step = 0; step < SignTiles<kWords>::kSteps; ++step) {
      multiply(keys.rows[tile][step], step);
    }
    uint32_t of_two[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A norm code, moved to where a float has its exponent, is the norm.
      constexpr uint32_t kBase = uint32_t(kNormBase) << kNormShift;
      const uint32_t code = __byte_perm(codes, 0, 0x4044 + ((2 * tile + half) << 8));
      const float norm = float_of((code << 3) + kBase);
      float scores[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 2 * half + i, positive = low[at] + 4 * (high[at] - 4 * sign[at]);
        scores[i] = __fadd_rd(scored(positive, query.gain[i], query.variance_term[i],
                                     query.offset[i], query.bias[i], norm),
                              32768.0f);
      }
      of_two[half] = bits_of(joined_floats(scores[0], scores[1], query.octave));
    }
    joined[tile] = __byte_perm(of_two[0], of_two[1], 0x5410);
  }
  const uint32_t own = plan.odd ? joined[1] : joined[0], give = plan.odd ? joined[0] : joined[1];
  return joined_halves(own, __shfl_xor_sync(~0u, give, 1), query.octaves);
}

/** Units [first, end) of this warp. `kOnce`: one quad, and no others before or after. */
template <int kWords, bool kBlocks, bool kOnce>
__device__ __forceinline__ void score_quads(Ring<kWords>& ring, const Zone& zone, int first,
                                            int end, const Queries<kWords>& queries, int quads,
                                            const BlockSteps& blocks, const ScoreOutput& out) {
  constexpr int kKeys = kUnitKeys<kWords>;
  constexpr int kParts = kKeys / 64;
  const LanePlan<kWords> plan;
  QueryTile<kWords> query;
  query.load(queries, 0);
  UnitOffsets<kWords, kBlocks> offsets, next;
  LaneSteps steps(blocks, zone.origin());
  if (kOnce) steps.pitch = 2;
  if (first < end) next.read(steps, first * kKeys, 0);
  for_units(ring, zone, first, end, [&](int unit, const uint8_t* stage, auto release) {
    uint8_t* target = out.scores + int64_t(unit) * kKeys + plan.key;
    // All of the unit, so that the next one sets out before this one is worked on.
    SignTiles<kWords> keys[kParts];
    uint32_t codes_of[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      keys[part].load(shared_address(stage) + part * 64 * 4 * kWords, plan);
      const uint2 eight =
          *reinterpret_cast<const uint2*>(stage + kUnitSignBytes<kWords> + part * 64 + plan.norms);
      codes_of[part] = __byte_perm(eight.x, eight.y, plan.own);
    }
    release();
    offsets = next;
    if (unit + 1 < end) next.read(steps, (unit + 1) * kKeys, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t codes = codes_of[part];
      uint32_t all = 0;
#pragma unroll 1
      for (int quad = 0; quad < (kOnce ? 1 : quads); ++quad) {
        if (!kOnce) query.load(queries, quad);
        if (!kOnce) offsets.read(steps, unit * kKeys, quad);
        offsets.set(part, queries, quad, query);
        const uint32_t four = score_64<kWords>(keys[part], codes, plan, query);
        all = quad == 0 ? four : joined_halves(all, four, query.octaves);
      }
      all = __vmaxu2(all, 0x00010001);
      // 255 times a code bounds what is unusable, and nothing else.
      all = __vminu2(all, __byte_perm(codes, 0, plan.own_keys) * 255);
      all = __vminu2(all, 0x00ff00ff);
      if constexpr (kWords == 2) {
        // Rows hold neighbours here: two lanes have the even and the odd keys of two rows.
        all = __byte_perm(all, __shfl_xor_sync(~0u, all, 2), plan.ordered);
      }
      uint32_t pair = __byte_perm(all, 0, kWords == 2 ? 0x4420 : plan.ordered);
      auto* score = reinterpret_cast<uint16_t*>(target + part * 64);
      if (!kOnce && out.earlier) {
        const uint32_t earlier = __byte_perm(*score, 0, 0x4140);
        all = joined_halves(earlier, __byte_perm(pair, 0, 0x4140), query.octaves);
        all = __vminu2(all, __vminu2(earlier * 255, 0x00ff00ff));
        pair = __byte_perm(all, 0, 0x4420);
      }
      *score = uint16_t(pair);
      if (kOnce || out.last) out.count_pair(all);
    }
  });
}

/**
 * Scores units [first, end) of this warp against the quantised queries of `quads` quads: of each
 * key, its scores joined. All lanes of a warp; warps do not wait for one another.
 * @param queries  after `settle`
 * @param blocks   logits of means, from the first of these queries on
 */
template <int kWords, bool kBlocks>
__device__ __forceinline__ void score_signs(Ring<kWords>& ring, const Zone& zone, int first,
                                            int end, const Queries<kWords>& queries, int quads,
                                            const BlockSteps& blocks, const ScoreOutput& out) {
  if (quads == 1 && !out.earlier && out.last) {
    score_quads<kWords, kBlocks, true>(ring, zone, first, end, queries, quads, blocks, out);
  } else {
    score_quads<kWords, kBlocks, false>(ring, zone, first, end, queries, quads, blocks, out);
  }
}

}  // namespace pariskv::cuda::device
