// The 4-bit estimate over Lanes16; included after float_verbs.inl, by the same files.

namespace pariskv::cpu {
namespace {

/** Estimates of one key, as decoded, for every query. */
template <int kVectors>
PKV_INLINE void estimate_heads(const EstimateRun& run, const Lanes16* values, float scale,
                               float* out) {
  constexpr int64_t kDim = kVectors * kLanes;
  int64_t h = 0;
  for (; h + 4 <= run.heads; h += 4) {
    const float* query = run.query + h * kDim;
    Lanes16 sums[4] = {all(0), all(0), all(0), all(0)};
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PKV_UNROLL
      for (int j = 0; j < 4; ++j) {
        sums[j] = multiply_add(values[v], load(query + j * kDim + v * kLanes), sums[j]);
      }
    }
    float four[4];
    _mm_storeu_ps(four, _mm_mul_ps(fold4(sums), _mm_set1_ps(scale)));
    PKV_UNROLL
    for (int j = 0; j < 4; ++j) out[(h + j) * run.head_stride] = four[j];
  }
  for (; h < run.heads; ++h) {
    Lanes16 sum = all(0);
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sum = multiply_add(values[v], load(run.query + h * kDim + v * kLanes), sum);
    }
    out[h * run.head_stride] = fold(sum) * scale;
  }
}

/** As kEstimateAhead, to the second-level cache: there more can be on their way. */
constexpr int64_t kEstimateFar = 4 * kEstimateAhead;

/** Asks for what is stored of the key in a slot. */
template <int kVectors, _mm_hint kHint>
PKV_INLINE void prefetch_key(const EstimateRun& run, int64_t slot) {
  constexpr int64_t kPlane = kVectors * kLanes / 8;
  for (int64_t byte = 0; byte < 4 * kPlane; byte += 64) {
    _mm_prefetch(run.records + slot * 4 * kPlane + byte, kHint);
  }
  _mm_prefetch(run.signs + slot * kPlane, kHint);
  _mm_prefetch(run.scales + slot, kHint);
}

template <int kVectors>
void estimate_run(const EstimateRun& run) {
  constexpr int64_t kPlane = kVectors * kLanes / 8;
  const Centres centres(run.centres);
  for (int64_t i = 0; i < run.count; ++i) {
    // Candidates lie all over the segment, so no hardware fetches them ahead.
    const int64_t last = run.count - 1;
    prefetch_key<kVectors, _MM_HINT_T1>(run, run.slots[lesser(i + kEstimateFar, last)]);
    prefetch_key<kVectors, _MM_HINT_T0>(run, run.slots[lesser(i + kEstimateAhead, last)]);

    const int64_t slot = run.slots[i];
    const uint8_t* record = run.records + slot * 4 * kPlane;
    Lanes16 values[kVectors];
    decode<kVectors>(run.signs + slot * kPlane, record, centres, values);
    PKV_UNROLL
    for (int v = 0; v < kVectors; v += 8) {
      uint8_t bytes[16] = {};
      memcpy(bytes, record + 3 * kPlane + 2 * v, kVectors < 8 ? 2 * kVectors : 16);
      const Lanes16 weights = load_uint8(bytes);
      PKV_UNROLL
      for (int k = 0; k < (kVectors < 8 ? kVectors : 8); ++k) {
        values[v + k] = values[v + k] * spread(weights, k);
      }
    }
    const float scale = float_of(uint32_t{run.scales[slot]} << kScaleCodeShift);
    estimate_heads<kVectors>(run, values, scale, run.estimates + i);
  }
}

void estimate(const EstimateRun& run) {
  with_size(RotatedDims{}, run.rotated_dim,
            [&](auto dim) { estimate_run<int(decltype(dim)::kValue / kLanes)>(run); });
}

}  // namespace
}  // namespace pariskv::cpu
