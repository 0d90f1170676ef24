// The float verbs over Lanes16, once for every instruction set: avx2.cpp and avx512.cpp include
// this after their lanes. They share nothing with the plain files but kernels.h: an inline
// function of cpu/numerics.h or policy/pariskv/codec/summary_layout.h, compiled with these files'
// flags, could be the copy that the linker keeps for older machines.

namespace pariskv::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kSubspaceDim = 8;

constexpr float kInt8Levels = 127;  // as in cpu/numerics.h

// As in policy/pariskv/codec/summary_layout.h.
constexpr uint32_t kNormCodeShift = 19;
constexpr int32_t kNormCodeBase = (127 - 5) << 4;
constexpr uint32_t kScaleCodeShift = 15;

const float kInfinity = __builtin_inff();

PKV_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

PKV_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

PKV_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
PKV_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

PKV_INLINE float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

/** Where the numbers of a half of a row are: what all readers below have in common. */
template <int64_t kSize>
struct Numbers {
  static constexpr int64_t kBytes = kSize;
  const char* numbers;

  /** Of so many numbers, without a scale behind them. */
  static constexpr int64_t bytes_of(int64_t dim) { return dim * kSize; }

  Numbers() = default;
  PKV_INLINE Numbers(const void* half, int64_t) : numbers(static_cast<const char*>(half)) {}
  PKV_INLINE const char* at(int64_t d) const { return numbers + d * kSize; }
};

/**
 * How a half of a row is read, by its RowType. Made of its address and its size (which tells where
 * a scale lies), a reader loads numbers d to d + 15. Nothing else here knows how they are written.
 */
struct Float32 : Numbers<4> {
  using Numbers::Numbers;
  PKV_INLINE Lanes16 load16(int64_t d) const { return load(reinterpret_cast<const float*>(at(d))); }
};
struct Float16 : Numbers<2> {
  using Numbers::Numbers;
  PKV_INLINE Lanes16 load16(int64_t d) const { return load_float16(at(d)); }
};
struct BFloat16 : Numbers<2> {
  using Numbers::Numbers;
  PKV_INLINE Lanes16 load16(int64_t d) const { return load_bfloat16(at(d)); }
};
struct Int8 : Numbers<1> {
  Lanes16 scale;

  Int8() = default;
  PKV_INLINE Int8(const void* half, int64_t dim) : Numbers(half, dim) {
    float own;
    memcpy(&own, at(dim), sizeof own);
    scale = all(own);
  }
  PKV_INLINE Lanes16 load16(int64_t d) const { return load_int8(at(d)) * scale; }
};
struct Q8_0 : Numbers<1> {
  using Numbers::Numbers;
  static constexpr int64_t bytes_of(int64_t dim) {
    return (dim + kQ8Block - 1) / kQ8Block * kQ8BlockBytes;
  }
  PKV_INLINE Lanes16 load16(int64_t d) const {
    const char* block = numbers + d / kQ8Block * kQ8BlockBytes;
    uint16_t bits;
    memcpy(&bits, block, sizeof bits);
    return load_int8(block + sizeof bits + d % kQ8Block) * all(_cvtsh_ss(bits));
  }
};

/** Calls `visit` with the reader above, of no half, that stands for `type`. */
template <typename Visit>
PKV_INLINE void with_source(RowType type, Visit visit) {
  switch (type) {
    case RowType::kFloat32:
      return visit(Float32{});
    case RowType::kFloat16:
      return visit(Float16{});
    case RowType::kBFloat16:
      return visit(BFloat16{});
    case RowType::kInt8:
      return visit(Int8{});
    case RowType::kQ8_0:
      return visit(Q8_0{});
  }
  no_kernel("type", int64_t(type));
}

/** Calls `visit` with `size`, one of the list, as a Constant. */
template <int64_t kFirst, int64_t... kRest, typename Visit>
PKV_INLINE void with_size(Sizes<kFirst, kRest...>, int64_t size, Visit visit) {
  if (size == kFirst) return visit(Constant<kFirst>{});
  if constexpr (sizeof...(kRest) > 0) {
    with_size(Sizes<kRest...>{}, size, visit);
  } else {
    no_kernel("size", size);
  }
}

/** i + (i+8), then i + (i+4): what is left of a fold is 2 apart, then 1. */
PKV_INLINE __m128 fold_to_four(Lanes16 a) {
  const __m256 eight = _mm256_add_ps(low(a), high(a));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/** The folds of four. */
PKV_INLINE __m128 fold4(const Lanes16* x) {
  const __m128 a = fold_to_four(x[0]), b = fold_to_four(x[1]);
  const __m128 c = fold_to_four(x[2]), d = fold_to_four(x[3]);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
  return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

PKV_INLINE float fold(Lanes16 a) {
  const __m128 four = fold_to_four(a);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/** The same fold with a > b ? a : b in place of the sum. */
PKV_INLINE float fold_largest(Lanes16 a) {
  const __m256 eight = _mm256_max_ps(low(a), high(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/** e^x, step by step as in cpu/numerics.h. */
PKV_INLINE Lanes16 exponential(Lanes16 x) {
  x = larger(all(-87.0f), x);
  x = smaller(all(88.0f), x);
  const Lanes16 n = rounded(x * all(1.44269504088896341f));
  Lanes16 r = multiply_add(n, all(-0.693359375f), x);
  r = multiply_add(n, all(2.12194440e-4f), r);
  Lanes16 p = all(1.9875691500e-4f);
  p = multiply_add(p, r, all(1.3981999507e-3f));
  p = multiply_add(p, r, all(8.3334519073e-3f));
  p = multiply_add(p, r, all(4.1665795894e-2f));
  p = multiply_add(p, r, all(1.6666665459e-1f));
  p = multiply_add(p, r, all(5.0000001201e-1f));
  return (multiply_add(p, r * r, r) + all(1.0f)) * power_of_two(n);
}

float sum_exp(const float* x, int64_t count, float shift) {
  Lanes16 sum = all(0);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum = sum + exponential(load(x + i) - all(shift));
  if (i < count) {
    const Lanes16 last = exponential(load_first(x + i, count - i) - all(shift));
    sum = sum + select(first(count - i), last, all(0));
  }
  return fold(sum);
}

void add_exp(const float* x, int64_t count, float shift, float* sums) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(sums + i, load(sums + i) + exponential(load(x + i) - all(shift)));
  }
  if (i < count) {
    const Lanes16 last = exponential(load_first(x + i, count - i) - all(shift));
    store_first(sums + i, load_first(sums + i, count - i) + last, count - i);
  }
}

/** The last numbers of a half, from `begin` on, with zeros behind them to 16. */
template <typename Source>
struct Rest {
  char bytes[kLanes * sizeof(float)] = {};

  PKV_INLINE Lanes16 load(Source half, int64_t begin, int64_t count) {
    memcpy(bytes, half.at(begin), size_t((count - begin) * Source::kBytes));
    half.numbers = bytes;
    return half.load16(0);
  }
};
/** A block has all of its 32 numbers, whichever count. */
template <>
struct Rest<Q8_0> {
  PKV_INLINE Lanes16 load(const Q8_0& half, int64_t begin, int64_t count) {
    return select(first(count - begin), half.load16(begin), all(0));
  }
};

template <typename Source>
PKV_INLINE void to_float_from(Source half, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, half.load16(i));
  if (i < count) store_first(out + i, Rest<Source>().load(half, i, count), count - i);
}

void to_float(const void* half, RowType type, int64_t count, float* out) {
  with_source(type, [&](auto kind) { to_float_from(decltype(kind)(half, count), count, out); });
}

/** What int8_scale of cpu/numerics.h says of numbers whose largest size has these bits. */
PKV_INLINE float int8_scale(uint32_t largest) {
  if (largest >= bits_of(kInfinity)) return __builtin_nanf("");
  const float scale = float_of(largest) / kInt8Levels;
  return scale * kInt8Levels < kInfinity ? scale : float_of(bits_of(scale) - 1);
}

template <typename Source>
PKV_INLINE void to_int8_from(Source half, int64_t count, char* out) {
  const int64_t whole = count / kLanes * kLanes;
  const Lanes16 last = whole < count ? Rest<Source>().load(half, whole, count) : all(0);
  Lanes16 sizes = magnitude(last);
  for (int64_t i = 0; i < whole; i += kLanes) sizes = larger_pattern(sizes, half.load16(i));
  const float scale = int8_scale(largest_pattern(sizes));
  memcpy(out + count, &scale, sizeof scale);
  if (!(scale > 0)) {
    memset(out, 0, size_t(count));
    return;
  }
  const auto levels = [&](Lanes16 x) {
    return smaller(larger(x / all(scale), all(-kInt8Levels)), all(kInt8Levels));
  };
  for (int64_t i = 0; i < whole; i += kLanes) store_int8(out + i, levels(half.load16(i)));
  if (whole < count) {
    char rest[kLanes];
    store_int8(rest, levels(last));
    memcpy(out + whole, rest, size_t(count - whole));
  }
}

void to_int8(const void* half, RowType type, int64_t count, char* out) {
  with_source(type, [&](auto kind) { to_int8_from(decltype(kind)(half, count), count, out); });
}

/** As in tail_copies.h. */
PKV_INLINE Lanes16 affine_of(Lanes16 x, Lanes16 factor, Lanes16 added) {
  constexpr float kMost = 3.402823466e38f;
  const Lanes16 moved = x * factor + added;
  return smaller(larger(moved, all(-kMost)), all(kMost)) + (x - x);
}

uint32_t affine(const float* x, const float* factor, const float* added, int64_t count,
                float* out) {
  Lanes16 sizes = all(0);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes16 y = affine_of(load(x + i), load(factor + i), load(added + i));
    sizes = larger_pattern(sizes, y);
    store(out + i, y);
  }
  if (i < count) {
    const int64_t rest = count - i;
    const Lanes16 y = affine_of(load_first(x + i, rest), load_first(factor + i, rest),
                                load_first(added + i, rest));
    sizes = larger_pattern(sizes, select(first(rest), y, all(0)));
    store_first(out + i, y, rest);
  }
  return largest_pattern(sizes);
}

}  // namespace
}  // namespace pariskv::cpu
