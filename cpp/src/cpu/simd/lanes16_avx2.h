/**
 * Sixteen floats, the `lanes` of kernels.h, in two AVX registers. Only for avx2.cpp:
 * everything is in an anonymous namespace, so that no copy of it can be linked elsewhere.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define PKV_INLINE inline __attribute__((always_inline))
// Loops over registers: unless all of a loop is unrolled, its array lives in memory.
#define PKV_UNROLL _Pragma("GCC unroll 32")

namespace pariskv::cpu {
namespace {

struct Lanes16 {
  __m256 lo, hi;
};

/** All bits of a lane, or none. */
struct Mask16 {
  __m256 lo, hi;
};

/** Numbers from 0 to 7, one per lane. */
struct Level16 {
  __m256i lo, hi;
};

/** How many queries share a row while it is in registers. */
constexpr int kQueryTile = 1;
/** Up to so many queries read rows as they are; for more, a tile is turned to floats once. */
constexpr int64_t kDirectQueries = 2;

PKV_INLINE Lanes16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PKV_INLINE Lanes16 load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
PKV_INLINE void store(float* out, Lanes16 a) {
  _mm256_storeu_ps(out, a.lo);
  _mm256_storeu_ps(out + 8, a.hi);
}

PKV_INLINE Mask16 first(int64_t count) {
  const __m256i n = _mm256_set1_epi32(int(count));
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(n, low)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, high))};
}

/** The first `count` lanes, 0 to 16, of memory that ends there; the others are 0. */
PKV_INLINE Lanes16 load_first(const float* x, int64_t count) {
  const Mask16 mask = first(count);
  return {_mm256_maskload_ps(x, _mm256_castps_si256(mask.lo)),
          _mm256_maskload_ps(x + 8, _mm256_castps_si256(mask.hi))};
}
PKV_INLINE void store_first(float* out, Lanes16 a, int64_t count) {
  const Mask16 mask = first(count);
  _mm256_maskstore_ps(out, _mm256_castps_si256(mask.lo), a.lo);
  _mm256_maskstore_ps(out + 8, _mm256_castps_si256(mask.hi), a.hi);
}

PKV_INLINE Lanes16 load_float16(const void* x) {
  const __m128i* halves = static_cast<const __m128i*>(x);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
PKV_INLINE Lanes16 load_bfloat16(const void* x) {
  const __m128i* halves = static_cast<const __m128i*>(x);
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
PKV_INLINE Lanes16 load_int8(const void* x) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(x));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
PKV_INLINE Lanes16 load_uint8(const void* x) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(x));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
/** Rounded, halves to even; every lane is from 0 to 255. */
PKV_INLINE void store_uint8(void* out, Lanes16 a) {
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)), 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(static_cast<__m128i*>(out), bytes);
}

PKV_INLINE Lanes16 operator+(Lanes16 a, Lanes16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
PKV_INLINE Lanes16 operator-(Lanes16 a, Lanes16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
PKV_INLINE Lanes16 operator*(Lanes16 a, Lanes16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
PKV_INLINE Lanes16 operator/(Lanes16 a, Lanes16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

/** a * b + c, rounded once. */
PKV_INLINE Lanes16 multiply_add(Lanes16 a, Lanes16 b, Lanes16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

/** a > b ? a : b, and a < b ? a : b. */
PKV_INLINE Lanes16 larger(Lanes16 a, Lanes16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
PKV_INLINE Lanes16 smaller(Lanes16 a, Lanes16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}

PKV_INLINE Lanes16 magnitude(Lanes16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
PKV_INLINE Lanes16 root(Lanes16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
PKV_INLINE Lanes16 rounded(Lanes16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/** Rounded to whole numbers of 16 bits, halves to even. */
PKV_INLINE __m256i to_words(Lanes16 a) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  return _mm256_permute4x64_epi64(pairs, 0xd8);
}
/** Rounded, halves to even; every lane is from -128 to 127. */
PKV_INLINE void store_int8(void* out, Lanes16 a) {
  const __m256i words = to_words(a);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(static_cast<__m128i*>(out), bytes);
}
/** 2^n of whole numbers, as long as that is a normal float. */
PKV_INLINE Lanes16 power_of_two(Lanes16 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i low = _mm256_add_epi32(_mm256_cvtps_epi32(n.lo), bias);
  const __m256i high = _mm256_add_epi32(_mm256_cvtps_epi32(n.hi), bias);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(high, 23))};
}

PKV_INLINE Mask16 at_least(Lanes16 a, Lanes16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
PKV_INLINE Lanes16 select(Mask16 mask, Lanes16 yes, Lanes16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, mask.lo), _mm256_blendv_ps(no.hi, yes.hi, mask.hi)};
}
PKV_INLINE uint16_t bits(Mask16 mask) {
  return uint16_t(_mm256_movemask_ps(mask.lo) | _mm256_movemask_ps(mask.hi) << 8);
}

/** The larger magnitude by bit pattern, in which infinity and NaN come last. */
PKV_INLINE Lanes16 larger_pattern(Lanes16 a, Lanes16 b) {
  const Lanes16 m = magnitude(b);
  return {
      _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.lo), _mm256_castps_si256(m.lo))),
      _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.hi), _mm256_castps_si256(m.hi)))};
}

/** The largest pattern of all lanes. */
PKV_INLINE uint32_t largest_pattern(Lanes16 a) {
  const __m256i eight = _mm256_max_epu32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
  const __m128i four =
      _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

PKV_INLINE __m256 low(Lanes16 a) { return a.lo; }
PKV_INLINE __m256 high(Lanes16 a) { return a.hi; }

/** The level with `bit` set where the mask is. */
PKV_INLINE Level16 with_bit(Level16 level, Mask16 mask, int bit) {
  const __m256i value = _mm256_set1_epi32(bit);
  return {_mm256_or_si256(level.lo, _mm256_and_si256(_mm256_castps_si256(mask.lo), value)),
          _mm256_or_si256(level.hi, _mm256_and_si256(_mm256_castps_si256(mask.hi), value))};
}

/** table[level], of a table of 8 in the low lanes. */
PKV_INLINE Lanes16 lookup(Lanes16 table, Level16 level) {
  return {_mm256_permutevar8x32_ps(table.lo, level.lo),
          _mm256_permutevar8x32_ps(table.lo, level.hi)};
}

/** Lane 2k in the low half and lane 2k + 1 in the high half. */
PKV_INLINE Lanes16 spread(Lanes16 a, int k) {
  const __m256 half = k < 4 ? a.lo : a.hi;
  const int lane = 2 * (k & 3);
  return {_mm256_permutevar8x32_ps(half, _mm256_set1_epi32(lane)),
          _mm256_permutevar8x32_ps(half, _mm256_set1_epi32(lane + 1))};
}

/** The butterflies of the Walsh-Hadamard transform between lanes: 1, 2, 4, 8 apart. */
PKV_INLINE Lanes16 butterflies(Lanes16 a) {
  // partner + own, or partner - own in the upper lane of a pair: one fused step, exact product.
  const __m256 ones = _mm256_set1_ps(1), twos = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
  const __m256 alternating = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
  const __m256 fours = _mm256_insertf128_ps(ones, _mm_set1_ps(-1), 1);
  const auto in_half = [&](__m256 x) {
    x = _mm256_fmadd_ps(x, alternating, _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, twos, _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, fours, _mm256_permute2f128_ps(x, x, 1));
  };
  const __m256 x = in_half(a.lo), y = in_half(a.hi);
  return {_mm256_add_ps(x, y), _mm256_sub_ps(x, y)};
}

/** `octet` of 8 vectors, by halving: a lane each. */
PKV_INLINE __m256 octets_of(__m256 a, __m256 b, __m256 c, __m256 d, __m256 e, __m256 f, __m256 g,
                            __m256 h) {
  const auto by_four = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const auto by_two = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
  };
  // Pairs four apart, so that the two halves of a register end up in order.
  const __m256 x = by_two(by_four(a, e), by_four(b, f));
  const __m256 y = by_two(by_four(c, g), by_four(d, h));
  return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
}

/** `octet` of each half of 8 vectors: lane 2k and 2k + 1 are those of terms[k]. */
PKV_INLINE Lanes16 octets(const Lanes16* t) {
  return {octets_of(t[0].lo, t[0].hi, t[1].lo, t[1].hi, t[2].lo, t[2].hi, t[3].lo, t[3].hi),
          octets_of(t[4].lo, t[4].hi, t[5].lo, t[5].hi, t[6].lo, t[6].hi, t[7].lo, t[7].hi)};
}

/** The 16 signed centres that codes stand for. */
struct Centres {
  __m256 negative, positive;
  PKV_INLINE explicit Centres(const float* x)
      : negative(_mm256_loadu_ps(x)), positive(_mm256_loadu_ps(x + 8)) {}
};

/** A key's sign and magnitude bits to centres, a subspace at a time. */
template <int kVectors>
PKV_INLINE void decode(const uint8_t* signs, const uint8_t* record, const Centres& centres,
                       Lanes16* values) {
  constexpr int kPlane = 2 * kVectors;
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i ones = _mm256_set1_epi8(1);
  // Of the four bits that are a lane's own: planes weigh 1, 2 and 4, the sign 8.
  const __m256i weights = _mm256_set1_epi32(0x08040201);
  const auto subspace = [&](int b) {
    const uint32_t bytes = uint32_t{record[b]} | uint32_t{record[kPlane + b]} << 8 |
                           uint32_t{record[2 * kPlane + b]} << 16 | uint32_t{signs[b]} << 24;
    const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(int(bytes)), lane);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(shifted, ones), weights);
    const __m256i index = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(centres.negative, index),
                            _mm256_permutevar8x32_ps(centres.positive, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  };
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) values[v] = {subspace(2 * v), subspace(2 * v + 1)};
}

}  // namespace
}  // namespace pariskv::cpu
