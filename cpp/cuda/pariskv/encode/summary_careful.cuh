/** The summary of any key at all: zero, not finite, tiny, huge, or with empty subspaces. */
#pragma once

#include "pariskv/encode/summary.cuh"

namespace pariskv::cuda::device {

/** Where the summary of a key goes. */
struct Summary {
  uint8_t* signs;
  uint8_t* norm;
  uint16_t* scale;
  uint8_t* record;
};

/** What takes a centre and a mean off a key; gains null: nothing does. */
struct Leaving {
  const float* gains;    // (head_dim)
  const int8_t* levels;  // (head_dim) of the mean, in steps of
  float step;
  const int16_t* centre;  // (head_dim) in steps of
  float centre_step;

  __device__ __forceinline__ float shift(int d) const {
    const float mean = __fmul_rn(float(levels[d]), step);
    return __fsub_rn(-mean, __fmul_rn(float(centre[d]), centre_step));
  }
  __device__ __forceinline__ float of(float x, int d) const {
    if (gains == nullptr || !finite(x)) return x;
    const float most = float_of(0x7f7fffffu);
    return fminf(fmaxf(fmaf(x, gains[d], shift(d)), -most), most);
  }
};

/** Any key at all, step by step as the CPU does it: one lane, slowly. */
template <typename Reader>
__device__ __noinline__ void encode_carefully(const char* key, const Leaving& leaving,
                                              const CodecTables& codec, bool unless_tame,
                                              const Summary& out) {
  const auto number = [&](int d) { return Reader::number(key, d, codec.head_dim); };
  if (unless_tame) {
    bool wild = false;
    for (int d = 0; d < codec.head_dim; ++d) {
      const float x = fabsf(number(d));
      wild = wild || (x > 0 && x < kLeastElement);
    }
    if (!wild) return;
  }
  const int subspaces = codec.rotated_dim / 8;
  for (int b = 0; b < subspaces; ++b) out.signs[b] = 0;
  for (int b = 0; b < 4 * subspaces; ++b) out.record[b] = 0;
  *out.norm = 0;
  *out.scale = 0;
  float y[512];
  float largest = 0;
  for (int d = 0; d < codec.rotated_dim; ++d) {
    y[d] = d < codec.head_dim ? leaving.of(number(d), d) : 0.0f;
    largest = larger_magnitude(largest, y[d]);
  }
  // A key that is its block's mean can be selected, though nothing is left of it.
  if (leaving.gains != nullptr && largest == 0) *out.norm = 1;
  if (!(largest > 0 && largest < infinity())) return;

  const bool tiny = largest < 0x1p-63f;
  const float lift = tiny ? 0x1p64f : 1.0f;
  const Size size(largest * lift);
  float lanes[16] = {};
  for (int d = 0; d < codec.rotated_dim; ++d) {
    y[d] = y[d] * lift * size.shrink;
    lanes[d % 16] = fmaf(y[d], y[d], lanes[d % 16]);
    if (codec.negative[d / 32] >> (d % 32) & 1) y[d] = -y[d];
  }
  const float norm = __fsqrt_rn(fold(lanes));
  for (int half = 1; half < codec.rotated_dim; half *= 2) {
    for (int k = 0; k < codec.rotated_dim / 2; ++k) {
      const int i = k / half * 2 * half + k % half;
      const float a = y[i], b = y[i + half];
      y[i] = a + b;
      y[i + half] = a - b;
    }
  }

  float weights[64];
  float heaviest = 0;
  for (int b = 0; b < subspaces; ++b) {
    float terms[8];
    for (int j = 0; j < 8; ++j) terms[j] = y[8 * b + j] * y[8 * b + j];
    const float square = octet(terms);
    const float radius = __fsqrt_rn(square);
    for (int j = 0; j < 8; ++j) {
      const float magnitude = fabsf(y[8 * b + j]);
      int level = 0;
      for (int t = 0; t < 7; ++t) {
        level += radius > 0 && magnitude >= codec.thresholds[t] * radius ? 1 : 0;
      }
      out.signs[b] |= uint8_t((y[8 * b + j] >= 0) << j);
      for (int plane = 0; plane < 3; ++plane) {
        out.record[plane * subspaces + b] |= uint8_t((level >> plane & 1) << j);
      }
      terms[j] = codec.centres[level] * magnitude;
    }
    weights[b] = radius > 0 ? __fdiv_rn(square, octet(terms)) * codec.unrotate : 0.0f;
    heaviest = larger(weights[b], heaviest);
  }

  const float unlift = tiny ? 0x1p-64f : 1.0f;
  const float scale = float_of(scale_bits(scale_code(bits_of(heaviest))));
  *out.norm = norm_code(size.restored(norm, unlift));
  *out.scale = scale_code(size.restored(scale, unlift));
  const float per_weight = __fdiv_rn(255.0f, scale);
  for (int b = 0; b < subspaces; ++b) {
    out.record[3 * subspaces + b] = uint8_t(rintf(weights[b] * per_weight));
  }
}

}  // namespace pariskv::cuda::device
