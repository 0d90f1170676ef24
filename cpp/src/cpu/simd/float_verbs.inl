// The float verbs over Lanes16, once for every instruction set: avx2.cpp and avx512.cpp include
// this after their lanes. They share nothing with the plain files but kernels.h: an inline
// function of summary_layout.h or numerics.h, compiled with these files' flags, could be the
// copy that the linker keeps for older machines.

namespace pariskv::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kMaxRotated = 256;
constexpr int64_t kSubspaceBits = 8;

// As in summary_layout.h.
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

/** What a row is made of, 16 elements at a time. */
struct Float32 {
  static constexpr int64_t kBytes = 4;
  PKV_INLINE static Lanes16 load16(const void* x) { return load(static_cast<const float*>(x)); }
};
struct Float16 {
  static constexpr int64_t kBytes = 2;
  PKV_INLINE static Lanes16 load16(const void* x) { return load_float16(x); }
};
struct BFloat16 {
  static constexpr int64_t kBytes = 2;
  PKV_INLINE static Lanes16 load16(const void* x) { return load_bfloat16(x); }
};

/** Calls `visit` with the type above that stands for `dtype`. */
template <typename Visit>
PKV_INLINE void with_source(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(Float32{});
    case DType::kFloat16:
      return visit(Float16{});
    case DType::kBFloat16:
      return visit(BFloat16{});
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

/** e^x, step by step as in numerics.h. */
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

template <typename Source>
PKV_INLINE void to_float_from(const void* source, int64_t count, float* out) {
  const char* in = static_cast<const char*>(source);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, Source::load16(in + i * Source::kBytes));
  if (i < count) {
    char rest[kLanes * sizeof(float)] = {};
    memcpy(rest, in + i * Source::kBytes, size_t((count - i) * Source::kBytes));
    store_first(out + i, Source::load16(rest), count - i);
  }
}

void to_float(const void* source, DType dtype, int64_t count, float* out) {
  with_source(dtype, [&](auto kind) { to_float_from<decltype(kind)>(source, count, out); });
}

/** The three halvings that find a magnitude's level, and what the levels stand for. */
struct Levels {
  Lanes16 middle;           // between levels 3 and 4
  Lanes16 quarters[2];      // between 1 and 2, between 5 and 6
  Lanes16 eighths;          // by twice the level known so far: between 0 and 1, 2 and 3, ...
  Lanes16 centres;
  float unrotate;           // 1 / sqrt(rotated_dim)

  PKV_INLINE explicit Levels(const EncodeRun& run) {
    const float* t = run.thresholds;
    const float odd[kLanes] = {t[0], t[0], t[2], t[2], t[4], t[4], t[6], t[6]};
    middle = all(t[3]);
    quarters[0] = all(t[1]);
    quarters[1] = all(t[5]);
    eighths = load(odd);
    centres = load_first(run.centres, 8);
    unrotate = 1.0f / square_root(float(run.rotated_dim));
  }
};

/** Where the summary of a key goes. */
struct Summary {
  uint8_t* signs;
  uint8_t* norm;
  uint16_t* scale;
  uint8_t* record;
};

PKV_INLINE void put(uint8_t* out, Mask16 mask) {
  const uint16_t word = bits(mask);
  memcpy(out, &word, sizeof word);
}

PKV_INLINE uint16_t scale_code_of(uint32_t pattern) {
  const uint32_t code = (pattern + (1u << kScaleCodeShift) - 1) >> kScaleCodeShift;
  return uint16_t(code > 0xfeff ? 0xfeff : code);
}

/** A key brought near 1 by an exact power of two, and the way back. */
struct Size {
  float lift, shrink, grow_a, grow_b, unlift;

  Size() = default;
  PKV_INLINE explicit Size(float largest) {
    lift = largest < 0x1p-63f ? 0x1p64f : 1.0f;
    unlift = largest < 0x1p-63f ? 0x1p-64f : 1.0f;
    int32_t exponent = int32_t(bits_of(largest * lift) >> 23) - 127;
    exponent = exponent < 126 ? exponent : 126;
    shrink = float_of(uint32_t(127 - exponent) << 23);
    grow_a = float_of(uint32_t(127 + exponent / 2) << 23);
    grow_b = float_of(uint32_t(127 + exponent - exponent / 2) << 23);
  }
  PKV_INLINE uint32_t restored(float x) const {
    const float own = x * grow_a * grow_b * unlift;
    return bits_of(0x1.fffffep127f < own ? 0x1.fffffep127f : own);
  }
};

/** A key after its rotation, without the 1 / sqrt. */
template <int kVectors>
struct Rotated {
  alignas(64) float y[kVectors * kLanes];
  Size size;
  float norm;
  bool usable;
};

/** The first steps of cpu/encode.cpp. */
template <int kVectors, typename Source>
PKV_INLINE void rotate(const char* key, const EncodeRun& run, Rotated<kVectors>& out) {
  Lanes16 y[kVectors];
  Lanes16 pattern = all(0);
  for (int v = 0; v < kVectors; ++v) {
    y[v] = Source::load16(key + v * kLanes * Source::kBytes);
    pattern = larger_pattern(pattern, y[v]);
  }
  const uint32_t largest = largest_pattern(pattern);
  out.usable = largest != 0 && largest < 0x7f800000u;
  if (!out.usable) return;
  const Size size(float_of(largest));
  out.size = size;

  Lanes16 squares = all(0);
  if (size.lift != 1) {
    for (int v = 0; v < kVectors; ++v) y[v] = y[v] * all(size.lift);
  }
  for (int v = 0; v < kVectors; ++v) {
    y[v] = y[v] * all(size.shrink);
    squares = multiply_add(y[v], y[v], squares);
    y[v] = butterflies(y[v] * load(run.rotation_signs + v * kLanes));
  }
  out.norm = square_root(fold(squares));
  for (int half = 1; half < kVectors; half *= 2) {
    for (int block = 0; block < kVectors; block += 2 * half) {
      for (int v = block; v < block + half; ++v) {
        const Lanes16 a = y[v], b = y[v + half];
        y[v] = a + b;
        y[v + half] = a - b;
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) store(out.y + v * kLanes, y[v]);
}

/** The other steps: codes, and weights for them. */
template <int kVectors>
PKV_INLINE void quantise(const Rotated<kVectors>& key, const Levels& levels, const Summary& out) {
  constexpr int64_t kPlane = kVectors * kLanes / 8;
  constexpr int kGroups = (kVectors + 7) / 8;  // 8 vectors hold 16 subspaces, one lane each
  if (!key.usable) {
    memset(out.signs, 0, kPlane);
    memset(out.record, 0, 4 * kPlane);
    *out.norm = 0;
    *out.scale = 0;
    return;
  }

  Lanes16 weights[kGroups];
  Lanes16 heaviest = all(0);
  for (int g = 0; g < kGroups; ++g) {
    Lanes16 terms[8];
    for (int k = 0; k < 8; ++k) {
      const int v = 8 * g + k;
      terms[k] = v < kVectors ? load(key.y + v * kLanes) : all(0);
      terms[k] = terms[k] * terms[k];
    }
    const Lanes16 square = octets(terms);
    // No magnitude reaches a level of an infinite radius.
    const Mask16 empty = at_least(all(0), square);
    const Lanes16 radii = select(empty, all(kInfinity), root(square));
    for (int k = 0; k < 8; ++k) {
      const int v = 8 * g + k;
      if (v >= kVectors) break;
      const Lanes16 y = load(key.y + v * kLanes), radius = spread(radii, k);
      const Lanes16 height = magnitude(y);
      const Mask16 four = at_least(height, levels.middle * radius);
      const Lanes16 quarter = select(four, levels.quarters[1], levels.quarters[0]);
      const Mask16 two = at_least(height, quarter * radius);
      const Level16 even = with_bit(with_bit(Level16{}, four, 4), two, 2);
      const Mask16 one = at_least(height, lookup(levels.eighths, even) * radius);
      terms[k] = lookup(levels.centres, with_bit(even, one, 1)) * height;
      put(out.signs + 2 * v, at_least(y, all(0)));
      put(out.record + 2 * v, one);
      put(out.record + kPlane + 2 * v, two);
      put(out.record + 2 * kPlane + 2 * v, four);
    }
    const Lanes16 weight = square / octets(terms) * all(levels.unrotate);
    weights[g] = select(empty, all(0), weight);
    heaviest = larger(heaviest, weights[g]);
  }

  const uint16_t code = scale_code_of(bits_of(fold_largest(heaviest)));
  const float scale = float_of(uint32_t{code} << kScaleCodeShift);
  *out.scale = scale_code_of(key.size.restored(scale));
  const int32_t norm_code =
      int32_t((key.size.restored(key.norm) + (1u << (kNormCodeShift - 1))) >> kNormCodeShift) -
      kNormCodeBase;
  *out.norm = uint8_t(norm_code < 1 ? 1 : norm_code > 255 ? 255 : norm_code);

  const Lanes16 per_weight = all(255.0f / scale);
  uint8_t bytes[kGroups * kLanes];
  for (int g = 0; g < kGroups; ++g) store_uint8(bytes + g * kLanes, weights[g] * per_weight);
  memcpy(out.record + 3 * kPlane, bytes, kPlane);
}

template <int kVectors, typename Source>
void encode_run(const EncodeRun& run) {
  constexpr int64_t kPlane = kVectors * kLanes / 8;
  // Keys of a batch do not wait for each other, and each step is short enough to overlap.
  constexpr int64_t kBatch = 8;
  const Levels levels(run);
  const char* keys = static_cast<const char*>(run.rows);
  Rotated<kVectors> batch[kBatch];
  const bool padded = run.head_dim < run.rotated_dim;
  char padded_key[kVectors * kLanes * Source::kBytes] = {};
  for (int64_t begin = 0; begin < run.count; begin += kBatch) {
    const int64_t end = lesser(begin + kBatch, run.count);
    for(int z=0;z<3;z++) for (int64_t i = begin; i < end; ++i) {
      const char* key = keys + i * run.row_stride * Source::kBytes;
      if (padded) {
        memcpy(padded_key, key, size_t(run.head_dim * Source::kBytes));
        key = padded_key;
      }
      rotate<kVectors, Source>(key, run, batch[i - begin]);
    }
    for (int64_t i = begin; i < end; ++i) {
      quantise<kVectors>(batch[i - begin], levels,
                         {run.signs + i * kPlane, run.norm_codes + i, run.scales + i,
                          run.records + i * 4 * kPlane});
    }
  }
}

void encode(const EncodeRun& run) {
  with_source(run.dtype, [&](auto kind) {
    switch (run.rotated_dim) {
      case 64:
        return encode_run<4, decltype(kind)>(run);
      case 128:
        return encode_run<8, decltype(kind)>(run);
      case 256:
        return encode_run<16, decltype(kind)>(run);
    }
  });
}

/** Estimates of one key for `kHeads` queries: decoded values against each. */
template <int kVectors>
PKV_INLINE void estimate_heads(const EstimateRun& run, const Lanes16* values, float scale,
                               float* out) {
  constexpr int64_t kDim = kVectors * kLanes;
  int64_t h = 0;
  for (; h + 4 <= run.heads; h += 4) {
    const float* query = run.query + h * kDim;
    Lanes16 sums[4] = {all(0), all(0), all(0), all(0)};
    for (int v = 0; v < kVectors; ++v) {
      for (int j = 0; j < 4; ++j) {
        sums[j] = multiply_add(values[v], load(query + j * kDim + v * kLanes), sums[j]);
      }
    }
    float four[4];
    _mm_storeu_ps(four, _mm_mul_ps(fold4(sums), _mm_set1_ps(scale)));
    for (int j = 0; j < 4; ++j) out[(h + j) * run.head_stride] = four[j];
  }
  for (; h < run.heads; ++h) {
    Lanes16 sum = all(0);
    for (int v = 0; v < kVectors; ++v) {
      sum = multiply_add(values[v], load(run.query + h * kDim + v * kLanes), sum);
    }
    out[h * run.head_stride] = fold(sum) * scale;
  }
}

template <int kVectors>
void estimate_run(const EstimateRun& run) {
  constexpr int64_t kPlane = kVectors * kLanes / 8;
  // Candidates lie all over the segment: far enough ahead to hide memory, not the caches.
  constexpr int64_t kAhead = 16;
  const Centres centres(run.centres);
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t coming = run.slots[lesser(i + kAhead, run.count - 1)];
    for (int64_t byte = 0; byte < 4 * kPlane; byte += 64) {
      _mm_prefetch(run.records + coming * 4 * kPlane + byte, _MM_HINT_T0);
    }
    _mm_prefetch(run.signs + coming * kPlane, _MM_HINT_T0);
    _mm_prefetch(run.scales + coming, _MM_HINT_T0);

    const int64_t slot = run.slots[i];
    const uint8_t* record = run.records + slot * 4 * kPlane;
    Lanes16 values[kVectors];
    decode<kVectors>(run.signs + slot * kPlane, record, centres, values);
    for (int v = 0; v < kVectors; v += 8) {
      uint8_t bytes[16] = {};
      memcpy(bytes, record + 3 * kPlane + 2 * v, kVectors < 8 ? 2 * kVectors : 16);
      const Lanes16 weights = load_uint8(bytes);
      for (int k = 0; k < 8 && v + k < kVectors; ++k) {
        values[v + k] = values[v + k] * spread(weights, k);
      }
    }
    const float scale = float_of(uint32_t{run.scales[slot]} << kScaleCodeShift);
    estimate_heads<kVectors>(run, values, scale, run.estimates + i);
  }
}

void estimate(const EstimateRun& run) {
  switch (run.rotated_dim) {
    case 64:
      return estimate_run<4>(run);
    case 128:
      return estimate_run<8>(run);
    case 256:
      return estimate_run<16>(run);
  }
}

}  // namespace
}  // namespace pariskv::cpu
