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

template <typename Source, int kVectors>
void round_dots_of(const RoundDotsRun& run) {
  for (int64_t r = 0; r < run.count; ++r) {
    const char* row = static_cast<const char*>(run.rows[r]);
    Lanes16 key[kVectors];
    Lanes16 largest = all(0);
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      key[v] = Source::load16(row + v * kLanes * Source::kBytes);
      largest = larger_pattern(largest, key[v]);
    }
    const uint32_t field = largest_pattern(largest) >> 23;
    const uint32_t exponent = field > kLeastKeyExponent ? field : kLeastKeyExponent;
    run.exponents[r] = uint8_t(exponent);
    if (exponent == 255) {
      for (int64_t q = 0; q < run.queries; ++q) run.dots[q * run.count + r] = 0;
      continue;
    }
    const Lanes16 up = all(float_of((254 + 6 - exponent) << 23));
    const __m256i most = _mm256_set1_epi16(127), least = _mm256_set1_epi16(-127);
    __m256i words[kVectors];
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      words[v] = _mm256_max_epi16(_mm256_min_epi16(to_words(key[v] * up), most), least);
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

void round_dots(const RoundDotsRun& run) {
  with_source(run.dtype, [&](auto kind) {
    using Source = decltype(kind);
    with_size(HeadDims{}, run.head_dim,
              [&](auto dim) { round_dots_of<Source, int(decltype(dim)::kValue / kLanes)>(run); });
  });
}

}  // namespace
}  // namespace pariskv::cpu
