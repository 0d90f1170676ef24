/**
 * Logits of the window's rows, in whole steps: products of numbers of 8 bits, so that they are the
 * same bits on every backend.
 */
#pragma once

#include "device/numbers.cuh"
#include "device/stored_rows.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/steps.cuh"

namespace pariskv::cuda::device {

/** Lanes that share a row, and heads that they work for at a time. */
constexpr int kRowLanes = 8;

/** Queries of some heads, quantised as they are. */
template <int kDim>
struct WindowQueries {
  alignas(16) int8_t elements[kRowLanes][kDim];
  float base[kRowLanes];  // steps per unit of a product of quantised numbers
};

/** A row of the window as eight lanes hold it, read ahead. */
template <typename Element, int kDim>
struct WindowRow {
  using Reader = RowReader<Element>;
  static constexpr int kPer16 = Reader::kPer16;
  static constexpr int kPieces = kDim / kPer16 / kRowLanes;  // of a lane, at most
  uint4 pieces[kPieces];

  __device__ __forceinline__ static int piece(int i) {
    return lane_id() % kRowLanes + kRowLanes * i;
  }
  __device__ __forceinline__ void read(const char* row, int head_dim) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool there = piece(i) < head_dim / kPer16;
      pieces[i] = there ? Reader::piece(row, kPer16 * piece(i)) : make_uint4(0, 0, 0, 0);
    }
  }
};

/**
 * One query, spread over a warp: element r of a lane is dimension 32 r + lane. To whole numbers of
 * which the largest is `levels`.
 */
template <typename Integer, int kWords>
__device__ __forceinline__ void quantise_plain(const float (&x)[kWords], float levels, float scale,
                                               Integer* out, float& base) {
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kWords; ++r) largest = fmaxf(largest, fabsf(x[r]));
  largest = warp_max(largest);
  const float steps = largest > 0 ? __fdiv_rn(levels, largest) : 0.0f;
  const float step = finite(steps) ? steps : 0.0f;
#pragma unroll
  for (int r = 0; r < kWords; ++r) {
    const float whole = rintf(__fmul_rn(x[r], step));
    out[32 * r + lane_id()] = finite(whole) ? Integer(int(whole)) : Integer(0);
  }
  if (lane_id() == 0) {
    base = __fmul_rn(__fmul_rn(scale, __fdiv_rn(largest, levels)), kOctaveSteps);
  }
}

/** The bits of a size: they sort as sizes do, and NaN is above all. */
__device__ __forceinline__ uint32_t size_bits(float x) { return bits_of(x) & 0x7fffffffu; }
constexpr uint32_t kInfiniteSize = 0x7f800000;

template <typename Element>
__device__ __forceinline__ uint32_t largest_size(const uint4& piece) {
  float x[RowReader<Element>::kPer16];
  RowReader<Element>::unpack(piece, x);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < RowReader<Element>::kPer16; ++i) largest = max(largest, size_bits(x[i]));
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
      const int give = upper ? x[i] : x[i + width], own = upper ? x[i + width] : x[i];
      x[i] = own + __shfl_xor_sync(~0u, give, width);
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
    Row::Reader::unpack(row.pieces[i], x);
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

}  // namespace pariskv::cuda::device
