// The kernels for AVX-512 with the byte shuffles of VBMI and the dot products of VNNI. Compiled
// with those flags, so nothing here may have external linkage but the table: see float_verbs.inl.

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined values of its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cpu/simd/kernels.h"
#include "cpu/simd/lanes16_avx512.h"

#include "cpu/simd/float_verbs.inl"

#include "cpu/simd/attend.inl"
#include "cpu/simd/encode.inl"
#include "cpu/simd/estimate.inl"
#include "cpu/simd/round_dots.inl"

#include "cpu/simd/joined_scores.inl"
#include "cpu/simd/mean_dots.inl"
#include "cpu/simd/observe.inl"
#include "cpu/simd/score_pages.inl"

namespace pariskv::cpu {

extern const Kernels kAvx512Kernels;

namespace {

/** 64 bytes that are a function of their place. */
struct alignas(64) Bytes64 {
  uint8_t value[64];
};

template <typename Rule>
constexpr Bytes64 bytes_by(Rule rule) {
  Bytes64 bytes{};
  for (int i = 0; i < 64; ++i) bytes.value[i] = uint8_t(rule(i));
  return bytes;
}

PKV_INLINE __m512i load64(const void* x) { return _mm512_loadu_si512(x); }
PKV_INLINE __m128i load16(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }

/** Four keys, a lane each: chunk `chunk` (16 subspaces) of keys 4 i to 4 i + 3. */
template <int kSubspaces>
PKV_INLINE __m512i four_keys(const uint8_t* signs, int i, int chunk) {
  if (kSubspaces == 16) return load64(signs + 64 * i);
  if (kSubspaces == 64) {
    const uint8_t* first = signs + 256 * i + 16 * chunk;
    const __m512i one = _mm512_castsi128_si512(load16(first));
    const __m512i two = _mm512_inserti32x4(one, load16(first + 64), 1);
    const __m512i three = _mm512_inserti32x4(two, load16(first + 128), 2);
    return _mm512_inserti32x4(three, load16(first + 192), 3);
  }
  const __m512i a = load64(signs + 128 * i), b = load64(signs + 128 * i + 64);
  return chunk == 0 ? _mm512_shuffle_i32x4(a, b, 0x88) : _mm512_shuffle_i32x4(a, b, 0xdd);
}

/** 16 keys, one per lane, 4 subspaces to a vector; the order of keys is Order16's. */
template <int kSubspaces>
PKV_INLINE void load_words(const uint8_t* signs, __m512i* words) {
  if (kSubspaces == 8) {
    const __m512 a = _mm512_castsi512_ps(load64(signs));
    const __m512 b = _mm512_castsi512_ps(load64(signs + 64));
    words[0] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    words[1] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    return;
  }
  PKV_UNROLL
  for (int chunk = 0; chunk < kSubspaces / 16; ++chunk) {
    __m512i keys[4];
    PKV_UNROLL
    for (int i = 0; i < 4; ++i) keys[i] = four_keys<kSubspaces>(signs, i, chunk);
    const __m512i a = _mm512_unpacklo_epi32(keys[0], keys[1]);
    const __m512i b = _mm512_unpackhi_epi32(keys[0], keys[1]);
    const __m512i c = _mm512_unpacklo_epi32(keys[2], keys[3]);
    const __m512i d = _mm512_unpackhi_epi32(keys[2], keys[3]);
    words[4 * chunk + 0] = _mm512_unpacklo_epi64(a, c);
    words[4 * chunk + 1] = _mm512_unpackhi_epi64(a, c);
    words[4 * chunk + 2] = _mm512_unpacklo_epi64(b, d);
    words[4 * chunk + 3] = _mm512_unpackhi_epi64(b, d);
  }
}

/** Which key is in a lane of load_words, and which lane a key is in. */
template <int kSubspaces>
struct Order16 {
  static constexpr Bytes64 kKeys = bytes_by([](int lane) {
    const int row = lane / 4 % 4, column = lane % 4;
    return kSubspaces == 8 ? 2 * row + column % 2 + column / 2 * 8 : 4 * column + row;
  });
  static constexpr Bytes64 kLaneOf = bytes_by([](int key) {
    key %= 16;
    return kSubspaces == 8 ? key % 8 / 2 * 4 + key % 2 + key / 8 * 2 : key % 4 * 4 + key / 4;
  });
};

/**
 * What every nibble of a head's query adds: for 4 subspaces, entry 16 s + n is the sum over
 * the four dimensions of nibble n of subspace s, with their signs.
 */
template <int kSubspaces>
struct NibbleTables {
  alignas(64) int8_t low[kSubspaces / 4][64];
  alignas(64) int8_t high[kSubspaces / 4][64];

  void build(const int8_t* query) {
    // Nibble n of this mask is n. The query goes in with 15 added, since one factor is unsigned.
    const __m512i plus = _mm512_set1_epi8(1), bias = _mm512_set1_epi8(15);
    const __m512i signs = _mm512_mask_mov_epi8(_mm512_set1_epi8(-1), 0xfedcba9876543210u, plus);
    const __m512i unbias = _mm512_sub_epi32(
        _mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), bias, signs));
    const auto fill = [&](const int8_t* four, int8_t* out) {
      int32_t word;
      memcpy(&word, four, sizeof word);
      const __m512i biased = _mm512_add_epi8(_mm512_set1_epi32(word), bias);
      const __m512i sums = _mm512_dpbusd_epi32(unbias, biased, signs);
      _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(sums));
    };
    for (int b = 0; b < kSubspaces; ++b) {
      fill(query + kSubspaceDim * b, low[b / 4] + b % 4 * 16);
      fill(query + kSubspaceDim * b + 4, high[b / 4] + b % 4 * 16);
    }
  }
};

/** Scores of 16 keys for the heads of `run`, whether they are usable or not. */
template <int kSubspaces>
PKV_INLINE __m128i score_16(const ScoreSignsRun& run, const NibbleTables<kSubspaces>* tables,
                            const uint8_t* signs, __m128i codes) {
  constexpr int kWords = kSubspaces / 4;
  __m512i words[kWords], low[kWords], high[kWords];
  load_words<kSubspaces>(signs, words);
  const __m512i nibble = _mm512_set1_epi8(15), place = _mm512_set1_epi32(0x30201000);
  PKV_UNROLL
  for (int w = 0; w < kWords; ++w) {
    // (word & nibble) | place
    low[w] = _mm512_ternarylogic_epi32(words[w], nibble, place, 0xea);
    high[w] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(words[w], 4), nibble, place, 0xea);
  }

  const __m128i keys = load16(Order16<kSubspaces>::kKeys.value);
  const __m512i norm_bits = _mm512_add_epi32(_mm512_cvtepu8_epi32(_mm_shuffle_epi8(codes, keys)),
                                             _mm512_set1_epi32(kNormCodeBase));
  const __m512 norm = _mm512_castsi512_ps(_mm512_slli_epi32(norm_bits, kNormCodeShift));
  const __m512 square = _mm512_mul_ps(norm, norm);

  __m128i of_heads[kHeadsAtOnce];
  for (int64_t h = 0; h < run.heads; ++h) {
    __m512i dot = _mm512_setzero_si512();
    PKV_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const __m512i sums =
          _mm512_add_epi8(_mm512_permutexvar_epi8(low[w], load64(tables[h].low[w])),
                          _mm512_permutexvar_epi8(high[w], load64(tables[h].high[w])));
      dot = _mm512_dpbusd_epi32(dot, _mm512_set1_epi8(1), sums);
    }
    const __m512 offset = _mm512_fmadd_ps(square, _mm512_set1_ps(run.variance_term[h]),
                                          _mm512_set1_ps(run.offset[h]));
    const __m512 score = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), norm),
                                         _mm512_set1_ps(run.slope[h]), offset);
    // Of NaN the second.
    const __m512 positive = _mm512_max_ps(score, _mm512_setzero_ps());
    const __m512 within = _mm512_min_ps(_mm512_set1_ps(255), positive);
    of_heads[h] = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(within));
  }
  const __m128i all = joined_heads(of_heads, run.heads, _mm_set1_epi8(char(run.octave)));
  return _mm_max_epu8(_mm_set1_epi8(1),
                      _mm_shuffle_epi8(all, load16(Order16<kSubspaces>::kLaneOf.value)));
}

/** At most kHeadsAtOnce heads; scores are joined with `earlier` ones when there are some. */
template <int kSubspaces>
void score_heads(const ScoreSignsRun& run, bool earlier) {
  NibbleTables<kSubspaces> tables[kHeadsAtOnce];
  for (int64_t h = 0; h < run.heads; ++h) {
    tables[h].build(run.query + h * kSubspaces * kSubspaceDim);
  }
  ScoreSignsRun now = run;
  float offsets[kHeadsAtOnce];
  if (run.block > 0) now.offset = offsets;
  uint8_t rest[16 * kSubspaces] = {};
  for (int64_t i = 0; i < run.count; i += 16) {
    const int64_t count = lesser(16, run.count - i);
    if (run.block > 0 && i % run.block == 0) offsets_of_block(run, i / run.block, offsets);
    const __mmask16 present = first(count);
    const uint8_t* signs = run.signs + i * kSubspaces;
    if (count < 16) {
      memcpy(rest, signs, size_t(count * kSubspaces));
      signs = rest;
    }
    const __m128i codes = _mm_maskz_loadu_epi8(present, run.norm_codes + i);
    __m128i scores = score_16<kSubspaces>(now, tables, signs, codes);
    if (earlier) {
      scores = joined(_mm_maskz_loadu_epi8(present, run.scores + i), scores,
                      _mm_set1_epi8(char(run.octave)));
    }
    const __mmask16 usable = _mm_test_epi8_mask(codes, codes);
    _mm_mask_storeu_epi8(run.scores + i, present, _mm_maskz_mov_epi8(usable, scores));
  }
}

void score_signs(const ScoreSignsRun& run) {
  ScoreSignsRun part = run;
  for (int64_t h = 0; h == 0 || h < run.heads; h += kHeadsAtOnce) {
    part.heads = lesser(kHeadsAtOnce, run.heads - h);
    part.query = run.query + h * run.subspaces * kSubspaceDim;
    part.slope = run.slope + h;
    part.variance_term = run.variance_term + h;
    part.offset = run.offset + h;
    part.steps = run.steps + h * run.step_stride;
    part.per_step = run.per_step + h;
    with_size(RotatedDims{}, run.subspaces * kSubspaceDim, [&](auto dim) {
      score_heads<int(decltype(dim)::kValue / kSubspaceDim)>(part, h > 0);
    });
  }
}

/** 64 keys, one per byte, a subspace to a vector; the order of keys is Order64's. */
template <int kSubspaces>
PKV_INLINE void load_columns(const uint8_t* signs, __m512i* columns) {
  constexpr int kRows = kSubspaces == 8 ? 8 : 16;
  PKV_UNROLL
  for (int chunk = 0; chunk < (kSubspaces + 15) / 16; ++chunk) {
    __m512i* rows = columns + 16 * chunk;
    PKV_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i] = kSubspaces == 8 ? load64(signs + 64 * i) : four_keys<kSubspaces>(signs, i, chunk);
    }
    // Each round moves the top bit of a row's number to the bottom of its bytes' places.
    PKV_UNROLL
    for (int round = 0; round < 4; ++round) {
      __m512i next[kRows];
      PKV_UNROLL
      for (int i = 0; i < kRows / 2; ++i) {
        next[2 * i] = _mm512_unpacklo_epi8(rows[i], rows[i + kRows / 2]);
        next[2 * i + 1] = _mm512_unpackhi_epi8(rows[i], rows[i + kRows / 2]);
      }
      PKV_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i] = next[i];
    }
  }
}

/** At which byte of load_columns a key is. */
template <int kSubspaces>
struct Order64 {
  static constexpr Bytes64 kByteOf = bytes_by([](int key) {
    return kSubspaces == 8 ? key / 2 % 4 * 16 + key / 8 * 2 + key % 2 : key % 4 * 16 + key / 4;
  });
};

/** Scores of 64 keys. */
template <int kSubspaces>
PKV_INLINE __m512i vote_64(const ScoreVotesRun& run, const uint8_t* signs, __m512i codes) {
  __m512i columns[kSubspaces];
  load_columns<kSubspaces>(signs, columns);
  __m512i best = _mm512_setzero_si512();
  for (int64_t h = 0; h < run.heads; ++h) {
    const uint8_t* table = run.votes + h * kSubspaces * 256;
    __m512i votes = _mm512_setzero_si512();
    PKV_UNROLL
    for (int b = 0; b < kSubspaces; ++b, table += 256) {
      const __m512i low = _mm512_permutex2var_epi8(load64(table), columns[b], load64(table + 64));
      const __m512i high =
          _mm512_permutex2var_epi8(load64(table + 128), columns[b], load64(table + 192));
      const __mmask64 upper = _mm512_movepi8_mask(columns[b]);
      votes = _mm512_add_epi8(votes, _mm512_mask_blend_epi8(upper, low, high));
    }
    best = _mm512_max_epu8(best, votes);
  }
  const __m512i in_order =
      _mm512_permutexvar_epi8(load64(Order64<kSubspaces>::kByteOf.value), best);
  return _mm512_maskz_add_epi8(_mm512_test_epi8_mask(codes, codes), in_order, _mm512_set1_epi8(1));
}

PKV_INLINE __mmask64 first64(int64_t count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

template <int kSubspaces>
void vote(const ScoreVotesRun& run) {
  uint8_t rest[64 * kSubspaces] = {};
  for (int64_t i = 0; i < run.count; i += 64) {
    const int64_t count = lesser(64, run.count - i);
    const __mmask64 present = first64(count);
    const uint8_t* signs = run.signs + i * kSubspaces;
    if (count < 64) {
      memcpy(rest, signs, size_t(count * kSubspaces));
      signs = rest;
    }
    const __m512i codes = _mm512_maskz_loadu_epi8(present, run.norm_codes + i);
    _mm512_mask_storeu_epi8(run.scores + i, present, vote_64<kSubspaces>(run, signs, codes));
  }
}

void score_votes(const ScoreVotesRun& run) {
  with_size(VoteDims{}, run.subspaces * kSubspaceDim,
            [&](auto dim) { vote<int(decltype(dim)::kValue / kSubspaceDim)>(run); });
}

int64_t collect(const uint8_t* scores, int64_t count, uint8_t threshold, int64_t* ties,
                int32_t base, int32_t* out) {
  constexpr Bytes64 kPlaces = bytes_by([](int i) { return i; });
  const __m512i places = load64(kPlaces.value);
  const __m512i border = _mm512_set1_epi8(char(threshold));
  int64_t written = 0;
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 present = first64(count - i);
    const __m512i block = _mm512_maskz_loadu_epi8(present, scores + i);
    uint64_t taken = _mm512_mask_cmpgt_epu8_mask(present, block, border);
    uint64_t equal = _mm512_mask_cmpeq_epu8_mask(present, block, border);
    if (equal != 0 && *ties > 0) {
      if (__builtin_popcountll(equal) > *ties) equal = _pdep_u64(first64(*ties), equal);
      *ties -= __builtin_popcountll(equal);
      taken |= equal;
    }
    // Packed in a register: packing straight to memory is very slow on some machines.
    __m512i packed = _mm512_maskz_compress_epi8(taken, places);
    const int64_t found = __builtin_popcountll(taken);
    const __m512i begin = _mm512_set1_epi32(base + int32_t(i));
    for (int64_t k = 0; k < found; k += 16) {
      const __m512i indices = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(packed));
      _mm512_storeu_si512(out + written + k, _mm512_add_epi32(indices, begin));
      packed = _mm512_shuffle_i32x4(packed, packed, 0x39);
    }
    written += found;
  }
  return written;
}

void tally(const uint8_t* signs, const int32_t* units, int64_t count, int64_t subspaces,
           int32_t* positive) {
  constexpr int kVectors = 4;  // 64 dimensions at a time stay in registers
  for (int64_t first = 0; first < subspaces; first += 2 * kVectors) {
    __m512i sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load64(positive + 8 * first + 16 * v);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i unit = _mm512_set1_epi32(units[i]);
      uint64_t bits;
      memcpy(&bits, signs + i * subspaces + first, sizeof bits);
      for (int v = 0; v < kVectors; ++v) {
        sums[v] = _mm512_mask_add_epi32(sums[v], __mmask16(bits >> (16 * v)), sums[v], unit);
      }
    }
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_si512(positive + 8 * first + 16 * v, sums[v]);
  }
}

}  // namespace

const Kernels kAvx512Kernels = {
    "avx512",   encode,      tally,    score_signs, score_votes, mean_dots,   collect,
    round_dots, step_logits, weigh,    add_shares,  estimate,    score_pages, attend,
    sum_exp,    add_exp,     to_float, to_int8,     affine,
};

}  // namespace pariskv::cpu
