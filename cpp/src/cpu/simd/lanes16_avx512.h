/**
 * Sixteen floats, the `lanes` of kernels.h, in one AVX-512 register. Only for avx512.cpp:
 * everything is in an anonymous namespace, so that no copy of it can be linked elsewhere.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define PKV_INLINE inline __attribute__((always_inline))
// Loops over registers: unless all of a loop is unrolled, its array lives in memory.
#define PKV_UNROLL _Pragma("GCC unroll 32")

namespace pariskv::cpu {
namespace {

struct Lanes16 {
  __m512 v;
};

using Mask16 = __mmask16;

/** Numbers from 0 to 7, one per lane. */
struct Level16 {
  __m512i v;
};

/** How many queries share a row while it is in registers. */
constexpr int kQueryTile = 4;
/** Up to so many queries read rows as they are; for more, a tile is turned to floats once. */
constexpr int64_t kDirectQueries = 16;

PKV_INLINE Lanes16 all(float x) { return {_mm512_set1_ps(x)}; }
PKV_INLINE Lanes16 load(const float* x) { return {_mm512_loadu_ps(x)}; }
PKV_INLINE void store(float* out, Lanes16 a) { _mm512_storeu_ps(out, a.v); }

PKV_INLINE Mask16 first(int64_t count) { return Mask16((1u << count) - 1); }

/** The first `count` lanes, 0 to 16, of memory that ends there; the others are 0. */
PKV_INLINE Lanes16 load_first(const float* x, int64_t count) {
  return {_mm512_maskz_loadu_ps(first(count), x)};
}
PKV_INLINE void store_first(float* out, Lanes16 a, int64_t count) {
  _mm512_mask_storeu_ps(out, first(count), a.v);
}

PKV_INLINE Lanes16 load_float16(const void* x) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(x)))};
}
PKV_INLINE Lanes16 load_bfloat16(const void* x) {
  const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(x));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
PKV_INLINE Lanes16 load_int8(const void* x) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(x));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
PKV_INLINE Lanes16 load_uint8(const void* x) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(x));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
/** Rounded, halves to even; every lane is from 0 to 255. */
PKV_INLINE void store_uint8(void* out, Lanes16 a) {
  _mm_storeu_si128(static_cast<__m128i*>(out), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

PKV_INLINE Lanes16 operator+(Lanes16 a, Lanes16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PKV_INLINE Lanes16 operator-(Lanes16 a, Lanes16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PKV_INLINE Lanes16 operator*(Lanes16 a, Lanes16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PKV_INLINE Lanes16 operator/(Lanes16 a, Lanes16 b) { return {_mm512_div_ps(a.v, b.v)}; }

/** a * b + c, rounded once. */
PKV_INLINE Lanes16 multiply_add(Lanes16 a, Lanes16 b, Lanes16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}

/** a > b ? a : b, and a < b ? a : b. */
PKV_INLINE Lanes16 larger(Lanes16 a, Lanes16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PKV_INLINE Lanes16 smaller(Lanes16 a, Lanes16 b) { return {_mm512_min_ps(a.v, b.v)}; }

PKV_INLINE Lanes16 magnitude(Lanes16 a) { return {_mm512_abs_ps(a.v)}; }
PKV_INLINE Lanes16 root(Lanes16 a) { return {_mm512_sqrt_ps(a.v)}; }
PKV_INLINE Lanes16 rounded(Lanes16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/** Rounded to whole numbers of 16 bits, halves to even. */
PKV_INLINE __m256i to_words(Lanes16 a) { return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)); }
/** Rounded, halves to even; every lane is from -128 to 127. */
PKV_INLINE void store_int8(void* out, Lanes16 a) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v));
  _mm_storeu_si128(static_cast<__m128i*>(out), bytes);
}
/** 2^n of whole numbers, as long as that is a normal float. */
PKV_INLINE Lanes16 power_of_two(Lanes16 n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}

PKV_INLINE Mask16 at_least(Lanes16 a, Lanes16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}
PKV_INLINE Lanes16 select(Mask16 mask, Lanes16 yes, Lanes16 no) {
  return {_mm512_mask_blend_ps(mask, no.v, yes.v)};
}
PKV_INLINE uint16_t bits(Mask16 mask) { return mask; }

/** The larger magnitude by bit pattern, in which infinity and NaN come last. */
PKV_INLINE Lanes16 larger_pattern(Lanes16 a, Lanes16 b) {
  return {_mm512_castsi512_ps(
      _mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(magnitude(b).v)))};
}

/** The largest pattern of all lanes. */
PKV_INLINE uint32_t largest_pattern(Lanes16 a) {
  return _mm512_reduce_max_epu32(_mm512_castps_si512(a.v));
}

PKV_INLINE __m256 low(Lanes16 a) { return _mm512_castps512_ps256(a.v); }
PKV_INLINE __m256 high(Lanes16 a) { return _mm512_extractf32x8_ps(a.v, 1); }

/** The level with `bit` set where the mask is. */
PKV_INLINE Level16 with_bit(Level16 level, Mask16 mask, int bit) {
  return {_mm512_mask_or_epi32(level.v, mask, level.v, _mm512_set1_epi32(bit))};
}

/** table[level], of a table of 8 in the low lanes. */
PKV_INLINE Lanes16 lookup(Lanes16 table, Level16 level) {
  return {_mm512_permutexvar_ps(level.v, table.v)};
}

/** Lane 2k in the low half and lane 2k + 1 in the high half. */
PKV_INLINE Lanes16 spread(Lanes16 a, int k) {
  const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return {_mm512_permutexvar_ps(_mm512_add_epi32(halves, _mm512_set1_epi32(2 * k)), a.v)};
}

/** The butterflies of the Walsh-Hadamard transform between lanes: 1, 2, 4, 8 apart. */
PKV_INLINE Lanes16 butterflies(Lanes16 a) {
  // partner + own, or partner - own in the upper lane of a pair: one fused step, exact product.
  const __m512 one = _mm512_set1_ps(1), minus = _mm512_set1_ps(-1);
  const auto step = [&](__m512 partner, Mask16 upper) {
    a.v = _mm512_fmadd_ps(a.v, _mm512_mask_blend_ps(upper, one, minus), partner);
  };
  step(_mm512_permute_ps(a.v, 0xb1), 0xaaaa);
  step(_mm512_permute_ps(a.v, 0x4e), 0xcccc);
  step(_mm512_shuffle_f32x4(a.v, a.v, 0xb1), 0xf0f0);
  step(_mm512_shuffle_f32x4(a.v, a.v, 0x4e), 0xff00);
  return a;
}

/** `octet` of each half of 8 vectors: lane 2k and 2k + 1 are those of terms[k]. */
PKV_INLINE Lanes16 octets(const Lanes16* terms) {
  // Adding folds two vectors into one each time; the order of lanes is put right at the end.
  __m512 by_four[4], by_two[2];
  PKV_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512 a = terms[2 * i].v, b = terms[2 * i + 1].v;
    by_four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 a = by_four[2 * i], b = by_four[2 * i + 1];
    by_two[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  const __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(by_two[0], by_two[1], 0x88),
                                   _mm512_shuffle_ps(by_two[0], by_two[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_ps(order, sum)};
}

/** The 16 signed centres that codes stand for. */
struct Centres {
  __m512 table;
  PKV_INLINE explicit Centres(const float* x) : table(_mm512_loadu_ps(x)) {}
};

/** A key's sign and magnitude bits to centres, 64 dimensions at a time. */
template <int kVectors>
PKV_INLINE void decode(const uint8_t* signs, const uint8_t* record, const Centres& centres,
                       Lanes16* values) {
  constexpr int kPlane = 2 * kVectors;
  const auto mask_at = [](const uint8_t* bits) {
    uint64_t word;
    memcpy(&word, bits, sizeof word);
    return __mmask64(word);
  };
  // Byte k of lane j becomes dimension 16 k + j: shifts then bring each vector down in turn.
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_add_epi32(_mm512_set1_epi32(0x30201000),
                                         _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)));
  PKV_UNROLL
  for (int c = 0; c < kVectors / 4; ++c) {
    __m512i index = _mm512_maskz_mov_epi8(mask_at(signs + 8 * c), _mm512_set1_epi8(8));
    PKV_UNROLL
    for (int plane = 0; plane < 3; ++plane) {
      const __mmask64 set = mask_at(record + plane * kPlane + 8 * c);
      index = _mm512_mask_add_epi8(index, set, index, _mm512_set1_epi8(char(1 << plane)));
    }
    index = _mm512_permutexvar_epi8(order, index);
    // The lookup heeds the low 4 bits of a lane only.
    PKV_UNROLL
    for (int k = 0; k < 4; ++k) {
      values[4 * c + k].v = _mm512_permutexvar_ps(_mm512_srli_epi32(index, 8 * k), centres.table);
    }
  }
}

}  // namespace
}  // namespace pariskv::cpu
