// The kernels for AVX2, FMA and F16C. Compiled with those flags, so nothing here may have
// external linkage but the table: see float_verbs.inl.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cpu/simd/kernels.h"
#include "cpu/simd/lanes16_avx2.h"

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

extern const Kernels kAvx2Kernels;

namespace {

PKV_INLINE __m256i load32(const void* x) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(x));
}
PKV_INLINE __m128i load16(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }

/** 32 keys, one per byte, a subspace to a vector. */
template <int kSubspaces>
PKV_INLINE void load_columns(const uint8_t* signs, __m256i* columns) {
  constexpr int kUsed = kSubspaces == 8 ? 8 : 16;
  PKV_UNROLL
  for (int chunk = 0; chunk < (kSubspaces + 15) / 16; ++chunk) {
    __m256i rows[16];
    PKV_UNROLL
    for (int i = 0; i < 16; ++i) {
      const uint8_t* a = signs + i * kSubspaces + 16 * chunk;
      const uint8_t* b = a + 16 * kSubspaces;
      const bool short_rows = kSubspaces == 8;
      rows[i] = short_rows ? _mm256_setr_m128i(_mm_loadu_si64(a), _mm_loadu_si64(b))
                           : _mm256_setr_m128i(load16(a), load16(b));
    }
    // Each round moves the top bit of a row's number to the bottom of its bytes' places.
    PKV_UNROLL
    for (int round = 0; round < 4; ++round) {
      __m256i next[16];
      PKV_UNROLL
      for (int i = 0; i < 8; ++i) {
        next[2 * i] = _mm256_unpacklo_epi8(rows[i], rows[i + 8]);
        next[2 * i + 1] = _mm256_unpackhi_epi8(rows[i], rows[i + 8]);
      }
      PKV_UNROLL
      for (int i = 0; i < 16; ++i) rows[i] = next[i];
    }
    PKV_UNROLL
    for (int i = 0; i < kUsed; ++i) columns[16 * chunk + i] = rows[i];
  }
}

/**
 * What every nibble of a head's query adds, counted from the least it can be: the sum over
 * its set bits of positive elements and over its clear bits of negative ones, so 0 to 60.
 * Twice that, less the sum of all magnitudes, is the product with signs.
 */
template <int kSubspaces>
struct NibbleTables {
  alignas(32) uint8_t entries[kSubspaces][32];  // low nibble, then high
  int32_t magnitudes;

  void build(const int8_t* query) {
    const __m128i zero = _mm_setzero_si128();
    const __m128i number = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m256i pick[4];  // element j of a nibble: the positive part, or 8 bytes on the negative
    PKV_UNROLL
    for (int j = 0; j < 4; ++j) {
      const __m128i bit = _mm_set1_epi8(char(1 << j));
      const __m128i clear = _mm_cmpeq_epi8(_mm_and_si128(number, bit), zero);
      const __m128i low =
          _mm_add_epi8(_mm_set1_epi8(char(j)), _mm_and_si128(clear, _mm_set1_epi8(8)));
      pick[j] = _mm256_setr_m128i(low, _mm_add_epi8(low, _mm_set1_epi8(4)));
    }
    __m128i total = zero;
    for (int b = 0; b < kSubspaces; ++b) {
      const __m128i part = _mm_loadu_si64(query + kSubspaceDim * b);
      const __m128i positive = _mm_max_epi8(part, zero);
      const __m128i negative = _mm_max_epi8(_mm_sub_epi8(zero, part), zero);
      const __m128i both = _mm_unpacklo_epi64(positive, negative);
      total = _mm_add_epi64(total, _mm_sad_epu8(both, zero));
      const __m256i twice = _mm256_broadcastsi128_si256(both);
      const __m256i sums = _mm256_add_epi8(
          _mm256_add_epi8(_mm256_shuffle_epi8(twice, pick[0]), _mm256_shuffle_epi8(twice, pick[1])),
          _mm256_add_epi8(_mm256_shuffle_epi8(twice, pick[2]),
                          _mm256_shuffle_epi8(twice, pick[3])));
      _mm256_store_si256(reinterpret_cast<__m256i*>(entries[b]), sums);
    }
    magnitudes = _mm_cvtsi128_si32(total) + _mm_extract_epi32(total, 2);
  }
};

/** Scores of 32 keys for the heads of `run`, whether they are usable or not. */
template <int kSubspaces>
PKV_INLINE __m256i score_32(const ScoreSignsRun& run, const NibbleTables<kSubspaces>* tables,
                            const uint8_t* signs, __m256i codes) {
  __m256i low[kSubspaces], high[kSubspaces];
  load_columns<kSubspaces>(signs, low);
  const __m256i nibble = _mm256_set1_epi8(15);
  PKV_UNROLL
  for (int b = 0; b < kSubspaces; ++b) {
    high[b] = _mm256_and_si256(_mm256_srli_epi16(low[b], 4), nibble);
    low[b] = _mm256_and_si256(low[b], nibble);
  }

  // Keys 0 to 7, 16 to 23, 8 to 15, 24 to 31: what unpacking words leaves.
  const __m128i early = _mm256_castsi256_si128(codes), late = _mm256_extracti128_si256(codes, 1);
  const auto norms = [](__m128i eight) {
    const __m256i bits =
        _mm256_add_epi32(_mm256_cvtepu8_epi32(eight), _mm256_set1_epi32(kNormCodeBase));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, kNormCodeShift));
  };
  const __m256 norm[4] = {norms(early), norms(late), norms(_mm_srli_si128(early, 8)),
                          norms(_mm_srli_si128(late, 8))};
  __m256i of_heads[kHeadsAtOnce];
  for (int64_t h = 0; h < run.heads; ++h) {
    const auto sums_of = [&](int b) {
      const __m256i entries = load32(tables[h].entries[b]);
      const __m256i l = _mm256_permute4x64_epi64(entries, 0x44);
      const __m256i u = _mm256_permute4x64_epi64(entries, 0xee);
      return _mm256_add_epi8(_mm256_shuffle_epi8(l, low[b]), _mm256_shuffle_epi8(u, high[b]));
    };
    // Two subspaces fit a byte. `sums` holds even keys, and odd ones 256-fold, modulo 2^16.
    __m256i sums = _mm256_setzero_si256(), odd = sums;
    PKV_UNROLL
    for (int b = 0; b < kSubspaces; b += 2) {
      const __m256i pair = _mm256_add_epi8(sums_of(b), sums_of(b + 1));
      sums = _mm256_add_epi16(sums, pair);
      odd = _mm256_add_epi16(odd, _mm256_srli_epi16(pair, 8));
    }
    const __m256i even = _mm256_sub_epi16(sums, _mm256_slli_epi16(odd, 8));
    const __m256i all_of = _mm256_set1_epi16(short(tables[h].magnitudes));
    const auto dots = [&](__m256i words) {
      return _mm256_sub_epi16(_mm256_add_epi16(words, words), all_of);
    };
    const __m256i near = dots(_mm256_unpacklo_epi16(even, odd));
    const __m256i far = dots(_mm256_unpackhi_epi16(even, odd));
    const __m128i eights[4] = {_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1),
                               _mm256_castsi256_si128(far), _mm256_extracti128_si256(far, 1)};
    __m256i whole[4];
    PKV_UNROLL
    for (int k = 0; k < 4; ++k) {
      const __m256 dot = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(eights[k]));
      const __m256 offset =
          _mm256_fmadd_ps(_mm256_mul_ps(norm[k], norm[k]), _mm256_set1_ps(run.variance_term[h]),
                          _mm256_set1_ps(run.offset[h]));
      const __m256 score =
          _mm256_fmadd_ps(_mm256_mul_ps(dot, norm[k]), _mm256_set1_ps(run.slope[h]), offset);
      // Of NaN the second: as a whole number it is the least, and so is packed to 0.
      whole[k] = _mm256_cvttps_epi32(_mm256_min_ps(_mm256_set1_ps(255), score));
    }
    of_heads[h] = _mm256_packus_epi16(_mm256_packs_epi32(whole[0], whole[2]),
                                      _mm256_packs_epi32(whole[1], whole[3]));
  }
  const __m256i all = joined_heads(of_heads, run.heads, _mm256_set1_epi8(char(run.octave)));
  return _mm256_max_epu8(_mm256_set1_epi8(1), _mm256_permutevar8x32_epi32(
                                                  all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
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
  uint8_t rest[32 * kSubspaces] = {}, rest_codes[32] = {}, rest_scores[32] = {};
  for (int64_t i = 0; i < run.count; i += 32) {
    const int64_t count = lesser(32, run.count - i);
    if (run.block > 0 && i % run.block == 0) offsets_of_block(run, i / run.block, offsets);
    const uint8_t* signs = run.signs + i * kSubspaces;
    const uint8_t* codes = run.norm_codes + i;
    uint8_t* out = run.scores + i;
    if (count < 32) {
      memcpy(rest, signs, size_t(count * kSubspaces));
      memcpy(rest_codes, codes, size_t(count));
      memcpy(rest_scores, out, size_t(count));
      signs = rest, codes = rest_codes, out = rest_scores;
    }
    const __m256i norms = load32(codes);
    __m256i scores = score_32<kSubspaces>(now, tables, signs, norms);
    if (earlier) scores = joined(load32(out), scores, _mm256_set1_epi8(char(run.octave)));
    const __m256i unusable = _mm256_cmpeq_epi8(norms, _mm256_setzero_si256());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_andnot_si256(unusable, scores));
    if (count < 32) memcpy(run.scores + i, out, size_t(count));
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

/** AVX2 has no lookup among 256 bytes; loads one by one are what is left. */
template <int kSubspaces>
void vote(const ScoreVotesRun& run) {
  for (int64_t i = 0; i < run.count; ++i) {
    const uint8_t* signs = run.signs + i * kSubspaces;
    int32_t best = 0;
    for (int64_t h = 0; h < run.heads; ++h) {
      const uint8_t* table = run.votes + h * kSubspaces * 256;
      int32_t votes = 0;
      PKV_UNROLL
      for (int b = 0; b < kSubspaces; ++b) votes += table[256 * b + signs[b]];
      best = votes > best ? votes : best;
    }
    run.scores[i] = run.norm_codes[i] == 0 ? 0 : uint8_t(1 + best);
  }
}

void score_votes(const ScoreVotesRun& run) {
  with_size(VoteDims{}, run.subspaces * kSubspaceDim,
            [&](auto dim) { vote<int(decltype(dim)::kValue / kSubspaceDim)>(run); });
}

/** The places of the set bits of every byte, first ones first. */
struct SetBits {
  uint8_t places[256][8];
};

constexpr SetBits list_set_bits() {
  SetBits list{};
  for (int byte = 0; byte < 256; ++byte) {
    int found = 0;
    for (int bit = 0; bit < 8; ++bit) {
      if (byte >> bit & 1) list.places[byte][found++] = uint8_t(bit);
    }
  }
  return list;
}

constexpr SetBits kSetBits = list_set_bits();

int64_t collect(const uint8_t* scores, int64_t count, uint8_t threshold, int64_t* ties,
                int32_t base, int32_t* out) {
  const __m256i border = _mm256_set1_epi8(char(threshold));
  int64_t written = 0;
  for (int64_t i = 0; i < count; i += 32) {
    const int64_t present = lesser(32, count - i);
    uint8_t rest[32] = {};
    if (present < 32) memcpy(rest, scores + i, size_t(present));
    const __m256i block = load32(present < 32 ? rest : scores + i);
    const uint32_t inside = present < 32 ? (1u << present) - 1 : ~0u;
    uint32_t equal = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(block, border))) & inside;
    const __m256i reaching = _mm256_cmpeq_epi8(_mm256_max_epu8(block, border), block);
    uint32_t taken = uint32_t(_mm256_movemask_epi8(reaching)) & inside & ~equal;
    for (; equal != 0 && *ties > 0; --*ties) {
      taken |= equal & -equal;
      equal &= equal - 1;
    }
    for (int64_t k = 0; taken != 0; k += 8, taken >>= 8) {
      const __m256i places = _mm256_cvtepu8_epi32(_mm_loadu_si64(kSetBits.places[taken & 255]));
      const __m256i indices = _mm256_add_epi32(places, _mm256_set1_epi32(base + int32_t(i + k)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + written), indices);
      written += __builtin_popcount(taken & 255);
    }
  }
  return written;
}

void tally(const uint8_t* signs, const int32_t* units, int64_t count, int64_t subspaces,
           int32_t* positive) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  constexpr int kBytes = 8;  // 64 dimensions at a time stay in registers
  for (int64_t first = 0; first < subspaces; first += kBytes) {
    __m256i sums[kBytes];
    auto* out = reinterpret_cast<__m256i*>(positive + 8 * first);
    for (int b = 0; b < kBytes; ++b) sums[b] = _mm256_loadu_si256(out + b);
    for (int64_t i = 0; i < count; ++i) {
      const __m256i unit = _mm256_set1_epi32(units[i]);
      for (int b = 0; b < kBytes; ++b) {
        const __m256i byte = _mm256_set1_epi32(signs[i * subspaces + first + b]);
        const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(byte, bit), bit);
        sums[b] = _mm256_add_epi32(sums[b], _mm256_and_si256(set, unit));
      }
    }
    for (int b = 0; b < kBytes; ++b) _mm256_storeu_si256(out + b, sums[b]);
  }
}

}  // namespace

const Kernels kAvx2Kernels = {
    "avx2",     encode,      tally,    score_signs, score_votes, mean_dots,   collect,
    round_dots, step_logits, weigh,    add_shares,  estimate,    score_pages, attend,
    sum_exp,    add_exp,     to_float, to_int8,     affine,
};

}  // namespace pariskv::cpu
