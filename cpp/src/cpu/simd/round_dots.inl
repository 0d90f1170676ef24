// Products of 8-bit keys and queries over Lanes16; included after float_verbs.inl, by the same
// files.

namespace pariskv::cpu {
namespace {

// As in octaves.h.
constexpr uint32_t kLeastKeyExponent = 16;

PKV_INLINE int32_t sum_of(__m256i x) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/** A key as whole numbers from -127 to 127; returns its exponent, 255: it is not finite. */
template <typename Source, int kVectors>
PKV_INLINE uint32_t round_key(const void* half, __m256i* words) {
  const Source row(half, kVectors * kLanes);
  Lanes16 key[kVectors];
  Lanes16 largest = all(0);
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    key[v] = row.load16(v * kLanes);
    largest = larger_pattern(largest, key[v]);
  }
  const uint32_t field = largest_pattern(largest) >> 23;
  const uint32_t exponent = field > kLeastKeyExponent ? field : kLeastKeyExponent;
  if (exponent == 255) return exponent;
  const Lanes16 up = all(float_of((254 + 6 - exponent) << 23));
  const __m256i most = _mm256_set1_epi16(127), least = _mm256_set1_epi16(-127);
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    words[v] = _mm256_max_epi16(_mm256_min_epi16(to_words(key[v] * up), most), least);
  }
  return exponent;
}

template <typename Source, int kVectors>
void round_dots_of(const RoundDotsRun& run) {
  for (int64_t r = 0; r < run.count; ++r) {
    __m256i words[kVectors];
    const uint32_t exponent = round_key<Source, kVectors>(run.keys[r], words);
    run.exponents[r] = uint8_t(exponent);
    if (exponent == 255) {
      for (int64_t q = 0; q < run.queries; ++q) run.dots[q * run.count + r] = 0;
      continue;
    }
    for (int64_t q = 0; q < run.queries; ++q) {
      const auto* query = reinterpret_cast<const __m256i*>(run.query + q * kVectors * kLanes);
      __m256i sum = _mm256_setzero_si256();
      PKV_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words[v], _mm256_loadu_si256(query + v)));
      }
      run.dots[q * run.count + r] = sum_of(sum);
    }
  }
}

#if defined(__AVX512VNNI__)
/**
 * The same for many keys and queries: a lane for each of 16 keys, 4 dimensions in a step. Keys
 * have 128 added, as one factor of a byte product has no sign, and the sum that this adds is taken
 * off.
 */
template <typename Source, int kVectors>
void round_many_dots_of(const RoundDotsRun& run) {
  constexpr int64_t kDim = kVectors * kLanes, kWords = kDim / 4;
  constexpr int64_t kKeys = 64, kQueries = 64, kAtOnce = 4;
  alignas(64) int32_t keys[kWords * kKeys];
  alignas(64) int8_t queries[kQueries * kDim];
  int32_t offsets[kQueries];
  for (int64_t at = 0; at < run.count; at += kKeys) {
    const int64_t count = lesser(kKeys, run.count - at);
    for (int64_t r = 0; r < count; ++r) {
      __m256i words[kVectors];
      const uint32_t exponent = round_key<Source, kVectors>(run.keys[at + r], words);
      run.exponents[at + r] = uint8_t(exponent);
      alignas(64) uint8_t bytes[kDim];
      for (int v = 0; v < kVectors; ++v) {
        const __m128i own = exponent == 255 ? _mm_setzero_si128() : _mm256_cvtepi16_epi8(words[v]);
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes + v * kLanes),
                        _mm_xor_si128(own, _mm_set1_epi8(char(0x80))));
      }
      for (int64_t w = 0; w < kWords; ++w) memcpy(keys + w * kKeys + r, bytes + 4 * w, 4);
    }
    for (int64_t begin = 0; begin < run.queries; begin += kQueries) {
      const int64_t some = lesser(kQueries, run.queries - begin);
      for (int64_t q = 0; q < some; ++q) {
        const auto* words = reinterpret_cast<const __m256i*>(run.query + (begin + q) * kDim);
        __m256i sum = _mm256_setzero_si256();
        for (int v = 0; v < kVectors; ++v) {
          const __m256i own = _mm256_loadu_si256(words + v);
          sum = _mm256_add_epi32(sum, _mm256_madd_epi16(own, _mm256_set1_epi16(-128)));
          _mm_store_si128(reinterpret_cast<__m128i*>(queries + q * kDim + v * kLanes),
                          _mm256_cvtepi16_epi8(own));
        }
        offsets[q] = sum_of(sum);
      }
      for (int64_t q = 0; q < some; q += kAtOnce) {
        for (int64_t r = 0; r < count; r += 2 * kLanes) {
          __m512i sums[kAtOnce][2];
          PKV_UNROLL
          for (int j = 0; j < kAtOnce; ++j) {
            sums[j][0] = sums[j][1] = _mm512_set1_epi32(offsets[lesser(q + j, some - 1)]);
          }
          for (int64_t w = 0; w < kWords; ++w) {
            const __m512i one = _mm512_load_si512(keys + w * kKeys + r);
            const __m512i other = _mm512_load_si512(keys + w * kKeys + r + kLanes);
            PKV_UNROLL
            for (int j = 0; j < kAtOnce; ++j) {
              int32_t four;
              memcpy(&four, queries + lesser(q + j, some - 1) * kDim + 4 * w, sizeof four);
              const __m512i query = _mm512_set1_epi32(four);
              sums[j][0] = _mm512_dpbusd_epi32(sums[j][0], one, query);
              sums[j][1] = _mm512_dpbusd_epi32(sums[j][1], other, query);
            }
          }
          for (int64_t j = 0; j < lesser(kAtOnce, some - q); ++j) {
            int32_t* dots = run.dots + (begin + q + j) * run.count + at + r;
            _mm512_mask_storeu_epi32(dots, first(lesser(count - r, kLanes)), sums[j][0]);
            _mm512_mask_storeu_epi32(
                dots + kLanes, first(lesser(greater(count - r - kLanes, 0), kLanes)), sums[j][1]);
          }
        }
      }
    }
  }
}
#endif

void round_dots(const RoundDotsRun& run) {
  with_source(run.type, [&](auto kind) {
    using Source = decltype(kind);
    with_size(HeadDims{}, run.head_dim, [&](auto dim) {
      constexpr int kVectors = int(decltype(dim)::kValue / kLanes);
#if defined(__AVX512VNNI__)
      if (run.count >= 32 && run.queries >= 8) return round_many_dots_of<Source, kVectors>(run);
#endif
      round_dots_of<Source, kVectors>(run);
    });
  });
}

}  // namespace
}  // namespace pariskv::cpu
