// Scores of the heads of a group, joined to one for each key: joined_score, a byte per key.
// Included by the files that score.

namespace pariskv::cpu {
namespace {

PKV_INLINE __m128i joined(__m128i a, __m128i b, __m128i octave) {
  return _mm_max_epu8(_mm_max_epu8(a, b), _mm_adds_epu8(_mm_avg_epu8(a, b), octave));
}

PKV_INLINE __m256i joined(__m256i a, __m256i b, __m256i octave) {
  return _mm256_max_epu8(_mm256_max_epu8(a, b), _mm256_adds_epu8(_mm256_avg_epu8(a, b), octave));
}

// Heads whose scores are joined at a time; more take another pass over the keys.
constexpr int64_t kHeadsAtOnce = 8;

/** By twos, by fours, all. What is not of the heads is overwritten. */
template <typename Bytes>
PKV_INLINE Bytes joined_heads(Bytes (&of)[kHeadsAtOnce], int64_t heads, Bytes octave) {
  for (int64_t h = heads; h % 4 != 0; ++h) of[h] = Bytes{};
  const auto four = [&](int first) {
    return joined(joined(of[first], of[first + 1], octave),
                  joined(of[first + 2], of[first + 3], octave), octave);
  };
  return heads > 4 ? joined(four(0), four(4), octave) : four(0);
}

}  // namespace
}  // namespace pariskv::cpu
