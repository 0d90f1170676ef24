// Keys to summaries over Lanes16; included after float_verbs.inl, by the same files.

namespace pariskv::cpu {
namespace {

/** The three halvings that find a magnitude's level, and what the levels stand for. */
struct Levels {
  Lanes16 middle;       // between levels 3 and 4
  Lanes16 quarters[2];  // between 1 and 2, between 5 and 6
  Lanes16 eighths;      // by twice the level known so far: between 0 and 1, 2 and 3, ...
  Lanes16 centres;
  float unrotate;  // 1 / sqrt(rotated_dim)

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
  bool usable;   // something is there to be encoded
  bool is_mean;  // else: nothing is left of a key that may be selected
};

/** Butterflies kHalf vectors apart, then those wider. */
template <int kVectors, int kHalf>
PKV_INLINE void between_vectors(Lanes16* y) {
  if constexpr (kHalf < kVectors) {
    PKV_UNROLL
    for (int k = 0; k < kVectors / 2; ++k) {
      const int v = k / kHalf * 2 * kHalf + k % kHalf;
      const Lanes16 a = y[v], b = y[v + kHalf];
      y[v] = a + b;
      y[v + kHalf] = a - b;
    }
    between_vectors<kVectors, 2 * kHalf>(y);
  }
}

/** The first steps of cpu/plain/encode.cpp. */
template <int kVectors, typename Source>
PKV_INLINE void rotate(const Source& key, const EncodeRun& run, Rotated<kVectors>& out) {
  Lanes16 y[kVectors];
  Lanes16 pattern = all(0);
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    y[v] = key.load16(v * kLanes);
    pattern = larger_pattern(pattern, y[v]);
  }
  uint32_t largest = largest_pattern(pattern);
  const bool finite = largest < 0x7f800000u;
  if (run.gain != nullptr) {
    pattern = all(0);
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const Lanes16 left =
          multiply_add(y[v], load(run.gain + v * kLanes), load(run.shift + v * kLanes));
      y[v] = smaller(larger(left, all(-0x1.fffffep127f)), all(0x1.fffffep127f));
      pattern = larger_pattern(pattern, y[v]);
    }
    largest = largest_pattern(pattern);
  }
  out.usable = largest != 0 && finite;
  out.is_mean = run.gain != nullptr && finite;
  out.size = Size(float_of(largest));
  if (out.size.lift != 1) {
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) y[v] = y[v] * all(out.size.lift);
  }
  Lanes16 squares = all(0);
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    y[v] = y[v] * all(out.size.shrink);
    squares = multiply_add(y[v], y[v], squares);
    y[v] = y[v] * load(run.rotation_signs + v * kLanes);
  }
  out.norm = square_root(fold(squares));
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) y[v] = butterflies(y[v]);
  between_vectors<kVectors, 1>(y);
  PKV_UNROLL
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
    *out.norm = key.is_mean ? 1 : 0;
    *out.scale = 0;
    return;
  }

  Lanes16 weights[kGroups];
  Lanes16 heaviest = all(0);
  for (int g = 0; g < kGroups; ++g) {
    Lanes16 terms[8];
    PKV_UNROLL
    for (int k = 0; k < 8; ++k) {
      const int v = 8 * g + k;
      terms[k] = v < kVectors ? load(key.y + v * kLanes) : all(0);
      terms[k] = terms[k] * terms[k];
    }
    const Lanes16 square = octets(terms);
    // No magnitude reaches a level of an infinite radius.
    const Mask16 empty = at_least(all(0), square);
    const Lanes16 radii = select(empty, all(kInfinity), root(square));
    PKV_UNROLL
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
  PKV_UNROLL
  for (int g = 0; g < kGroups; ++g) store_uint8(bytes + g * kLanes, weights[g] * per_weight);
  memcpy(out.record + 3 * kPlane, bytes, kPlane);
}

template <int kVectors, typename Source>
void encode_run(const EncodeRun& run) {
  constexpr int64_t kPlane = kVectors * kLanes / 8;
  // Keys of a batch do not wait for each other, and each step is short enough to overlap.
  constexpr int64_t kBatch = 8;
  const Levels levels(run);
  Rotated<kVectors> batch[kBatch];
  const bool padded = run.head_dim < run.rotated_dim;
  char padded_key[Source::bytes_of(kVectors * kLanes)] = {};
  for (int64_t begin = 0; begin < run.count; begin += kBatch) {
    const int64_t end = lesser(begin + kBatch, run.count);
    for (int64_t i = begin; i < end; ++i) {
      Source key(run.keys[i], run.head_dim);
      if (padded) {
        memcpy(padded_key, key.numbers, size_t(Source::bytes_of(run.head_dim)));
        key.numbers = padded_key;
      }
      rotate(key, run, batch[i - begin]);
    }
    for (int64_t i = begin; i < end; ++i) {
      quantise<kVectors>(batch[i - begin], levels,
                         {run.signs + i * kPlane, run.norm_codes + i, run.scales + i,
                          run.records + i * 4 * kPlane});
    }
  }
}

void encode(const EncodeRun& run) {
  with_source(run.type, [&](auto kind) {
    with_size(RotatedDims{}, run.rotated_dim, [&](auto dim) {
      encode_run<int(decltype(dim)::kValue / kLanes), decltype(kind)>(run);
    });
  });
}

}  // namespace
}  // namespace pariskv::cpu
