/**
 * How much a head finds in its window: the log-sum-exp of its logits over some resident rows, in
 * whole numbers, so that it is the same bits on every backend. Also the small functions that the
 * scale of a score is made of (codec/head_scale.h has them for the CPU).
 */
#pragma once

#include "device/cluster.cuh"
#include "device/numbers.cuh"
#include "device/signal.cuh"

namespace pariskv::cuda::device {

/** Rows that are looked at: the zone's predecessors, at most so many, and the last ones. */
constexpr int kFirstRows = 16;
constexpr int kLastRows = 112;
constexpr int kWindowRows = kFirstRows + kLastRows;

/** Steps of a logit in octaves, 64 to the octave, per unit of a logit. */
constexpr float kOctaveSteps = 92.3324826f;
constexpr float kMostSteps = 0x1p20f;
constexpr float kByteLevels = 127;
constexpr uint32_t kLeastExponent = 16;
constexpr float kInvisible = -30;  // octaves; less adds nothing

/** log2 of a positive number, in a line from power to power. */
__device__ __forceinline__ float rough_log2(float x) {
  const uint32_t bits = bits_of(x);
  const float significand = float_of((bits & 0x7fffffu) | 0x3f800000u);
  return __fadd_rn(float(int(bits >> 23) - 127), __fsub_rn(significand, 1.0f));
}
/** Its inverse, for x <= 0. */
__device__ __forceinline__ float rough_exp2(float x) {
  if (!(x >= kInvisible)) return 0;
  const float whole = floorf(x);
  return __fadd_rn(1.0f, __fsub_rn(x, whole)) * float_of(uint32_t(127 + int(whole)) << 23);
}

/** Lanes that share a row, and heads that they work for at a time. */
constexpr int kRowLanes = 8;

/** Stands for a row that is none, or does not count. */
constexpr int kNoSteps = -(1 << 28);

/** Queries of some heads, quantised as they are. */
template <int kDim>
struct WindowQueries {
  alignas(16) int8_t elements[kRowLanes][kDim];
  float base[kRowLanes];  // steps per unit of a product of quantised numbers
};

/** A row of the window as eight lanes hold it, read ahead. */
template <typename Element, int kDim>
struct WindowRow {
  static constexpr int kPer16 = kElementsPer16<Element>;
  static constexpr int kPieces = kDim / kPer16 / kRowLanes;  // of a lane, at most
  uint4 pieces[kPieces];

  __device__ __forceinline__ static int piece(int i) {
    return lane_id() % kRowLanes + kRowLanes * i;
  }
  __device__ __forceinline__ void read(const char* row, int head_dim) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool there = piece(i) < head_dim / kPer16;
      pieces[i] = there ? reinterpret_cast<const uint4*>(row)[piece(i)] : make_uint4(0, 0, 0, 0);
    }
  }
};

__device__ __forceinline__ int steps_of(float x) {
  return int(rintf(fminf(fmaxf(x, -kMostSteps), kMostSteps)));
}

/** One query, spread over a warp: element r of a lane is dimension 32 r + lane. */
template <int kWords>
__device__ __forceinline__ void quantise_plain(const float (&x)[kWords], float scale, int8_t* out,
                                               float& base) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) largest = fmaxf(largest, fabsf(x[r]));
  largest = warp_max(largest);
  const float steps = largest > 0 ? __fdiv_rn(kByteLevels, largest) : 0.0f;
  const float step = finite(steps) ? steps : 0.0f;
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    const float whole = rintf(__fmul_rn(x[r], step));
    out[32 * r + lane_id()] = finite(whole) ? int8_t(int(whole)) : int8_t(0);
  }
  if (lane_id() == 0) {
    base = __fmul_rn(__fmul_rn(scale, __fdiv_rn(largest, kByteLevels)), kOctaveSteps);
  }
}

/** The bits of a size: they sort as sizes do, and NaN is above all. */
__device__ __forceinline__ uint32_t size_bits(float x) { return bits_of(x) & 0x7fffffffu; }
constexpr uint32_t kInfiniteSize = 0x7f800000;

template <typename Element>
__device__ __forceinline__ uint32_t largest_size(const uint4& piece) {
  float x[kElementsPer16<Element>];
  unpack<Element>(piece, x);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kElementsPer16<Element>; ++i) largest = max(largest, size_bits(x[i]));
  return largest;
}

/** Four numbers times a power of two, as whole numbers from -127 to 127. */
__device__ __forceinline__ uint32_t quantised(const float* x, float up) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // The sum with 1.5 * 2^23 rounds, and has the whole number in its lower bits.
    const int whole = int(bits_of(__fadd_rn(__fmul_rn(x[i], up), 12582912.0f)) - 0x4b400000u);
    packed |= uint32_t(min(max(whole, -127), 127) & 255) << 8 * i;
  }
  return packed;
}

/** Eight sums over eight lanes: lane i is left with sum i. */
__device__ __forceinline__ int sum_eight(int (&x)[8]) {
  const int lane = lane_id();
#pragma unroll
  for (int width = 4; width >= 1; width /= 2) {
    const bool upper = lane & width;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const int give = upper ? x[i] : x[i + width], keep = upper ? x[i + width] : x[i];
      x[i] = keep + __shfl_xor_sync(~0u, give, width);
    }
  }
  return x[0];
}

/** Steps of the logits of a row for eight heads, one in each of its lanes. Warps come whole. */
template <typename Element, int kDim>
__device__ __forceinline__ int score_row(const WindowQueries<kDim>& queries,
                                         const WindowRow<Element, kDim>& row, float softcap) {
  using Row = WindowRow<Element, kDim>;
  const int part = lane_id() % kRowLanes;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < Row::kPieces; ++i) {
    largest = max(largest, largest_size<Element>(row.pieces[i]));
  }
#pragma unroll
  for (int step = 1; step < kRowLanes; step *= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  }
  // Rows that are not finite do not count, whatever becomes of them here.
  const uint32_t exponent = min(max(largest >> 23, kLeastExponent), 254u);
  const float up = float_of((254 + 6 - exponent) << 23), down = float_of((exponent - 6) << 23);
  int dots[kRowLanes] = {};
#pragma unroll
  for (int i = 0; i < Row::kPieces; ++i) {
    float x[Row::kPer16];
    unpack<Element>(row.pieces[i], x);
#pragma unroll
    for (int word = 0; word < Row::kPer16 / 4; ++word) {
      const int packed = int(quantised(x + 4 * word, up));
      const int at = Row::piece(i) * Row::kPer16 + 4 * word;
#pragma unroll
      for (int h = 0; h < kRowLanes; ++h) {
        dots[h] = __dp4a(packed, *reinterpret_cast<const int*>(&queries.elements[h][at]), dots[h]);
      }
    }
  }
  const int dot = sum_eight(dots);
  const int cap = softcap > 0 ? int(rintf(fminf(__fmul_rn(softcap, kOctaveSteps), kMostSteps)))
                              : int(kMostSteps);
  const float unit = __fmul_rn(queries.base[part], down);
  const int steps = finite(unit) ? steps_of(__fmul_rn(float(dot), unit)) : 0;
  return largest < kInfiniteSize ? min(max(steps, -cap), cap) : kNoSteps;
}

/**
 * The log-sum-exp of the window for one head, in octaves; a warp. Waits for its rows.
 * @param rows   (kWindowRows) window words: see signal.cuh
 * @param token  of the step
 * @param bias  of the sink; null: none
 */
__device__ __forceinline__ float sum_window(const uint64_t* rows, uint32_t token,
                                            const float* bias) {
  constexpr int kOfLane = kWindowRows / 32;
  uint64_t found[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) found[i] = load_relaxed(rows + lane_id() + 32 * i);
  int steps[kOfLane + 1];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    while (uint32_t(found[i] >> 32) != token) found[i] = load_relaxed(rows + lane_id() + 32 * i);
    steps[i] = int(uint32_t(found[i]));
  }
  steps[kOfLane] = lane_id() == 0 && bias != nullptr && finite(*bias)
                       ? steps_of(__fmul_rn(*bias, kOctaveSteps))
                       : kNoSteps;
  int most = kNoSteps;
#pragma unroll
  for (int i = 0; i <= kOfLane; ++i) most = max(most, steps[i]);
  most = __reduce_max_sync(~0u, most);
  if (most == kNoSteps) return -infinity();
  int sum = 0;
#pragma unroll
  for (int i = 0; i <= kOfLane; ++i) {
    const int less = most - steps[i];
    if (less < 1024) sum += ((64 + (-less & 63)) << 10) >> ((less + 63) >> 6);
  }
  sum = __reduce_add_sync(~0u, sum);
  return __fadd_rn(__fmul_rn(float(most), 0x1p-6f), __fsub_rn(rough_log2(float(sum)), 16.0f));
}

}  // namespace pariskv::cuda::device
