// Products of queries and means of blocks; included after round_dots.inl, by the same files.

namespace pariskv::cpu {
namespace {

template <int kVectors>
void mean_dots_of(const MeanDotsRun& run) {
  for (int64_t b = 0; b < run.count; ++b) {
    __m256i mean[kVectors];
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int8_t* levels = run.means + (b * kVectors + v) * kLanes;
      mean[v] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
    }
    for (int64_t h = 0; h < run.heads; ++h) {
      const auto* query = reinterpret_cast<const __m256i*>(run.query + h * kVectors * kLanes);
      __m256i sum = _mm256_setzero_si256();
      PKV_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(mean[v], _mm256_loadu_si256(query + v)));
      }
      run.dots[h * run.stride + b] = sum_of(sum);
    }
  }
}

void mean_dots(const MeanDotsRun& run) {
  with_size(RotatedDims{}, run.dim,
            [&](auto dim) { mean_dots_of<int(decltype(dim)::kValue / kLanes)>(run); });
}

/** What the keys of a block start from: (heads) offsets of their scores. */
PKV_INLINE void offsets_of_block(const ScoreSignsRun& run, int64_t block, float* offsets) {
  for (int64_t h = 0; h < run.heads; ++h) {
    const float steps = float(run.steps[h * run.step_stride + block]);
    offsets[h] = __builtin_fmaf(steps, run.per_step[h], run.offset[h]);
  }
}

}  // namespace
}  // namespace pariskv::cpu
