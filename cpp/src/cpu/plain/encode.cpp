// Keys to summaries: spec steps 1 to 5 of "encode", one key at a time.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/numerics.h"
#include "cpu/plain/plain.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cpu::plain {

void walsh_hadamard(float* x, int64_t count) {
  for (int64_t half = 1; half < count; half *= 2) {
    for (int64_t block = 0; block < count; block += 2 * half) {
      for (int64_t i = block; i < block + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

namespace {

/** Magnitude level of |y| in a subspace of length `radius`. */
int level_of(float magnitude, float radius, const float* thresholds) {
  int level = 0;
  for (int t = 0; t < 7; ++t) level += magnitude >= thresholds[t] * radius;
  return level;
}

float scale_of(uint16_t code) { return float_of(uint32_t{code} << kScaleShift); }

struct Summary {
  uint8_t* signs;
  uint8_t* norm;
  uint16_t* scale;
  uint8_t* record;
};

void mark_unusable(const Summary& out, int64_t rotated_dim) {
  const SummaryLayout layout{1, 1, rotated_dim, 0};
  std::memset(out.signs, 0, layout.subspaces());
  std::memset(out.record, 0, layout.record_bytes());
  *out.norm = 0;
  *out.scale = 0;
}

/** A key that is its block's mean: nothing is left of it, and it can be selected. */
void mark_mean(const Summary& out, int64_t rotated_dim) {
  mark_unusable(out, rotated_dim);
  *out.norm = 1;
}

/** key * gain + shift; what passes the range of a float stays at its end. */
void lean(const EncodeRun& run, float* key) {
  constexpr float kMost = 0x1.fffffep127f;
  for (int64_t d = 0; d < run.head_dim; ++d) {
    if (!(std::fabs(key[d]) < INFINITY)) continue;  // and the key is not usable
    key[d] = std::clamp(std::fma(key[d], run.gain[d], run.shift[d]), -kMost, kMost);
  }
}

void encode_key(const float* key, const EncodeRun& run, const Summary& out) {
  const int64_t rotated_dim = run.rotated_dim;
  const int64_t subspaces = rotated_dim / kSubspaceDim;
  const SummaryLayout layout{1, 1, rotated_dim, 0};

  float largest = 0;
  bool finite = true;
  for (int64_t d = 0; d < run.head_dim; ++d) {
    finite = finite && std::fabs(key[d]) < INFINITY;
    largest = std::max(largest, std::fabs(key[d]));
  }
  if (!finite) return mark_unusable(out, rotated_dim);
  if (largest == 0)
    return run.gain == nullptr ? mark_unusable(out, rotated_dim) : mark_mean(out, rotated_dim);

  // An exact power of two brings the largest element near 1: squares neither overflow nor
  // vanish, whatever the key's size. Subnormals are lifted first.
  const float lift = largest < 0x1p-63f ? 0x1p64f : 1.0f;
  const int32_t exponent = std::min<int32_t>(int32_t(bits_of(largest * lift) >> 23) - 127, 126);
  const float shrink = float_of(uint32_t(127 - exponent) << 23);

  // The norm, and the rotation without its 1 / sqrt(rotated_dim).
  float y[kMaxRotatedDim] = {};
  for (int64_t d = 0; d < run.head_dim; ++d) y[d] = key[d] * lift * shrink;
  const float norm = std::sqrt(dot(y, y, rotated_dim));
  for (int64_t d = 0; d < rotated_dim; ++d) y[d] = y[d] * run.rotation_signs[d];
  walsh_hadamard(y, rotated_dim);

  std::memset(out.record, 0, layout.record_bytes());
  const float unrotate = 1.0f / std::sqrt(float(rotated_dim));
  float weights[kMaxRotatedDim / kSubspaceDim];
  float heaviest = 0;
  for (int64_t b = 0; b < subspaces; ++b) {
    const float* part = y + b * kSubspaceDim;
    float terms[kSubspaceDim];
    for (int j = 0; j < kSubspaceDim; ++j) terms[j] = part[j] * part[j];
    const float square = octet(terms);  // r_b^2
    const float radius = std::sqrt(square);

    uint8_t signs = 0;
    for (int j = 0; j < kSubspaceDim; ++j) {
      const float magnitude = std::fabs(part[j]);
      signs |= uint8_t((part[j] >= 0) << j);
      const int level = radius > 0 ? level_of(magnitude, radius, run.thresholds) : 0;
      for (int plane = 0; plane < 3; ++plane) {
        out.record[plane * layout.plane_bytes() + b] |= uint8_t(((level >> plane) & 1) << j);
      }
      terms[j] = run.centres[level] * magnitude;
    }
    out.signs[b] = signs;

    // w_b = norm r_b / alpha_b, where alpha_b = <v, u> = <v, k_b> / r_b.
    const float aligned = octet(terms);
    weights[b] = radius > 0 ? square / aligned * unrotate : 0.0f;
    heaviest = std::max(heaviest, weights[b]);
  }

  // Back to the key's own size.
  const float grow_a = float_of(uint32_t(127 + exponent / 2) << 23);
  const float grow_b = float_of(uint32_t(127 + exponent - exponent / 2) << 23);
  const auto restore = [&](float x) {
    return std::min(x * grow_a * grow_b / lift, 0x1.fffffep127f);
  };
  const float scale = scale_of(scale_code(bits_of(heaviest)));
  *out.norm = norm_code(bits_of(restore(norm)));
  *out.scale = scale_code(bits_of(restore(scale)));

  const float per_weight = 255.0f / scale;
  for (int64_t b = 0; b < subspaces; ++b) {
    out.record[layout.weights_offset() + b] = uint8_t(std::nearbyint(weights[b] * per_weight));
  }
}

}  // namespace

void encode(const EncodeRun& run) {
  const SummaryLayout layout{1, 1, run.rotated_dim, 0};
  float key[kMaxRotatedDim];
  for (int64_t i = 0; i < run.count; ++i) {
    to_float(run.keys[i], run.type, run.head_dim, key);
    if (run.gain != nullptr) lean(run, key);
    encode_key(key, run,
               {run.signs + i * layout.subspaces(), run.norm_codes + i, run.scales + i,
                run.records + i * layout.record_bytes()});
  }
}

void tally(const uint8_t* signs, const int32_t* units, int64_t count, int64_t subspaces,
           int32_t* positive) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < subspaces * kSubspaceDim; ++d) {
      if (signs[i * subspaces + d / 8] >> (d % 8) & 1) positive[d] += units[i];
    }
  }
}

}  // namespace pariskv::cpu::plain
