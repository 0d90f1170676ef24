// Scores of pages over Lanes16; included after float_verbs.inl, by the same files.

namespace pariskv::cpu {
namespace {

/** One query's part of a page's score. */
PKV_INLINE float page_score(float sum, float unit) {
  float score = sum * unit;
  score = score > -kMostPageScore ? score : -kMostPageScore;
  return score < kMostPageScore ? score : kMostPageScore;
}

/** Sums of a page of `kQueries` queries. */
template <int kVectors, int kQueries>
PKV_INLINE void page_sums(const uint16_t* digest, const float* query, Lanes16* sums) {
  constexpr int64_t kDim = kVectors * kLanes;
  PKV_UNROLL
  for (int j = 0; j < kQueries; ++j) sums[j] = all(0);
  PKV_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const Lanes16 middle = load_float16(digest + v * kLanes);
    const Lanes16 distance = load_float16(digest + kDim + v * kLanes);
    PKV_UNROLL
    for (int j = 0; j < kQueries; ++j) {
      const Lanes16 q = load(query + j * kDim + v * kLanes);
      sums[j] = multiply_add(q, middle, sums[j]);
      sums[j] = multiply_add(magnitude(q), distance, sums[j]);
    }
  }
}

template <int kVectors>
void score_pages_of(const ScorePagesRun& run) {
  constexpr int64_t kDim = kVectors * kLanes;
  for (int64_t p = 0; p < run.count; ++p) {
    const uint16_t* digest = run.digests + p * 2 * kDim;
    const float unit = run.units[p];
    float score = 0;
    int64_t q = 0;
    for (; q + 4 <= run.queries; q += 4) {
      Lanes16 sums[4];
      page_sums<kVectors, 4>(digest, run.query + q * kDim, sums);
      float four[4];
      _mm_storeu_ps(four, fold4(sums));
      PKV_UNROLL
      for (int j = 0; j < 4; ++j) score = score + page_score(four[j], unit);
    }
    for (; q < run.queries; ++q) {
      Lanes16 sum;
      page_sums<kVectors, 1>(digest, run.query + q * kDim, &sum);
      score = score + page_score(fold(sum), unit);
    }
    run.scores[p] = score;
  }
}

void score_pages(const ScorePagesRun& run) {
  with_size(HeadDims{}, run.dim,
            [&](auto dim) { score_pages_of<int(decltype(dim)::kValue / kLanes)>(run); });
}

}  // namespace
}  // namespace pariskv::cpu
