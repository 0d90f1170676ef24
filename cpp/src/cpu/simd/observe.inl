// Whole-number attention, 8 lanes at a time; included by the files of both instruction sets.

namespace pariskv::cpu {
namespace {

void step_logits(const StepLogitsRun& run) {
  const __m256 unit = _mm256_set1_ps(run.unit), infinity = _mm256_set1_ps(kInfinity);
  const __m256 most = _mm256_set1_ps(0x1p22f), least = _mm256_set1_ps(-0x1p22f);
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256i offset = _mm256_set1_epi32(run.offset);
  const __m256i cap = _mm256_set1_epi32(run.most), floor = _mm256_set1_epi32(-run.most);
  const auto of = [&](__m256i dots, __m256 steps) {
    __m256 own = _mm256_mul_ps(unit, steps);
    own = _mm256_and_ps(own, _mm256_cmp_ps(_mm256_andnot_ps(sign, own), infinity, _CMP_LT_OQ));
    own = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), own);
    own = _mm256_min_ps(_mm256_max_ps(own, least), most);
    const __m256i logits = _mm256_add_epi32(offset, _mm256_cvtps_epi32(own));
    return _mm256_max_epi32(_mm256_min_epi32(logits, cap), floor);
  };
  int64_t i = 0;
  for (; i + 8 <= run.count; i += 8) {
    auto* to = reinterpret_cast<__m256i*>(run.logits + i);
    const auto* dots = reinterpret_cast<const __m256i*>(run.dots + i);
    const __m256i own = of(_mm256_loadu_si256(dots), _mm256_loadu_ps(run.steps + i));
    _mm256_storeu_si256(to, _mm256_max_epi32(_mm256_loadu_si256(to), own));
  }
  if (i == run.count) return;
  int32_t dots[8] = {}, logits[8];
  float steps[8] = {};
  memcpy(dots, run.dots + i, size_t(run.count - i) * 4);
  memcpy(steps, run.steps + i, size_t(run.count - i) * 4);
  const __m256i own =
      of(_mm256_loadu_si256(reinterpret_cast<__m256i*>(dots)), _mm256_loadu_ps(steps));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(logits), own);
  for (int64_t r = 0; i + r < run.count; ++r) {
    int32_t& to = run.logits[i + r];
    to = to > logits[r] ? to : logits[r];
  }
}

uint64_t weigh(int32_t* logits, int64_t count, int32_t most, const uint32_t* table) {
  const __m256i top = _mm256_set1_epi32(most), low = _mm256_set1_epi32(63);
  const __m256i zero = _mm256_setzero_si256();
  __m256i sums = zero;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    auto* at = reinterpret_cast<__m256i*>(logits + i);
    const __m256i below = _mm256_sub_epi32(top, _mm256_loadu_si256(at));
    const __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table),
                                                 _mm256_and_si256(below, low), 4);
    // A shift of 32 or more leaves nothing; so it is with kNoLogit.
    const __m256i weights = _mm256_srlv_epi32(entry, _mm256_srli_epi32(below, 6));
    _mm256_storeu_si256(at, weights);
    sums = _mm256_add_epi64(sums, _mm256_unpacklo_epi32(weights, zero));
    sums = _mm256_add_epi64(sums, _mm256_unpackhi_epi32(weights, zero));
  }
  uint64_t four[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(four), sums);
  uint64_t sum = four[0] + four[1] + four[2] + four[3];
  for (; i < count; ++i) {
    const uint32_t below = uint32_t(most) - uint32_t(logits[i]);
    const uint32_t weight = below >> 6 < 32 ? table[below & 63] >> (below >> 6) : 0;
    logits[i] = int32_t(weight);
    sum += weight;
  }
  return sum;
}

void add_shares(const int32_t* weights, int64_t count, uint64_t reciprocal, uint64_t* shares) {
  const __m256i low = _mm256_set1_epi64x(int64_t(reciprocal & 0xffffffffu));
  const __m256i high = _mm256_set1_epi64x(int64_t(reciprocal >> 32));
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    auto* at = reinterpret_cast<__m256i*>(shares + i);
    const __m256i weight =
        _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + i)));
    const __m256i product = _mm256_add_epi64(_mm256_mul_epu32(weight, low),
                                             _mm256_slli_epi64(_mm256_mul_epu32(weight, high), 32));
    _mm256_storeu_si256(
        at, _mm256_add_epi64(_mm256_loadu_si256(at), _mm256_srli_epi64(product, kShareShift)));
  }
  for (; i < count; ++i) shares[i] += uint32_t(weights[i]) * reciprocal >> kShareShift;
}

}  // namespace
}  // namespace pariskv::cpu
