/**
 * The arithmetic of a summary, bit for bit that of cpu/plain/encode.cpp, for ordinary keys: 64
 * dimensions to a lane, in registers. More make the code outgrow the multiprocessor's 32 KB for
 * instructions. summary_careful.cuh does the other keys.
 */
#pragma once

#include <type_traits>

#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cuda::device {

constexpr unsigned kAllLanes = 0xffffffffu;

// |u| is cut into cells of this many to a radius: cell 0 holds no threshold, cells 1 to 7 one
// each, well inside, and magnitudes above are level 7. So a cell found roughly, one lookup and
// one exact comparison give the level.
constexpr float kCells = 1 / 0.095f;
constexpr float kCellMargin = 0.1f;  // of a cell: how far inside

// 1.5 * 2^23: adding it rounds to a whole number, which then lies in the lowest bits.
constexpr float kRounder = 12582912.0f;
constexpr uint32_t kRounderBits = 0x4b400000u;

// Below this square of a radius, or share of the norm's, the short forms of square root and
// division may not hold, nor the next comment.
constexpr float kLeastSquare = 0x1p-46f;

// Keys of 16 bits are not brought near 1 first: a power of two makes no difference, as long as
// nothing is rounded below the least normal number. That is so for norms whose squares lie between
// these, save in the sums of squares, before a term as large as an element of this size adds.
constexpr float kLeastNormSquare = 0x1p-34f, kMostNormSquare = 0x1p33f;
constexpr float kLeastElement = 0x1p-46f;

/** The constants of the codec, as the summaries' arithmetic wants them. */
struct CodecTables {
  int32_t head_dim;
  int32_t rotated_dim;
  float unrotate;  // 1 / sqrt(rotated_dim)
  float thresholds[7];
  float centres[8];
  // What belongs to a cell, over the radius. Its threshold: none reaches infinity, all reach 0. The
  // centre of the level that a magnitude has when it is one below the cell's number.
  float cell_thresholds[32];
  float cell_centres[32];
  uint32_t negative[16];  // bit d % 32 of word d / 32: rotation sign d is -1
  // The same for 4 bytes of a row: the bits to flip in their elements.
  uint32_t flips[512];
};

constexpr int kWords = 2;  // of a lane's bit plane

/** a / b, rounded correctly, for numbers whose quotient is far from overflow and underflow. */
__device__ __forceinline__ float ratio(float a, float b) {
  float y = ptx::rcp_approx_ftz(b);
  y = fmaf(y, fmaf(-b, y, 1.0f), y);
  const float q = a * y;
  return fmaf(y, fmaf(-b, q, a), q);
}

/** sqrt(x), rounded correctly, given nearly 1 / sqrt(x). */
__device__ __forceinline__ float root(float x, float inverse_root) {
  const float r = x * inverse_root;
  return fmaf(fmaf(-r, r, x), 0.5f * inverse_root, r);
}

// The largest magnitude so far; NaN once there was one.
__device__ __forceinline__ float larger_magnitude(float most, float x) {
  return ptx::max_nan(most, fabsf(x));
}

/** The largest magnitude of a lane's elements; NaN when one is. */
template <int kDims>
__device__ __forceinline__ float largest_of(const float (&y)[kDims]) {
  float most[4] = {};  // chains of their own, so that none has to wait
#pragma unroll
  for (int d = 0; d < kDims; ++d) most[d % 4] = larger_magnitude(most[d % 4], y[d]);
  return larger_magnitude(larger_magnitude(most[0], most[1]), larger_magnitude(most[2], most[3]));
}

/** Whether the quick way holds for a float key's largest magnitude. */
__device__ __forceinline__ bool ordinary(float largest) {
  return largest >= 0x1p-63f && largest < 0x1p126f;
}

/** A key's size, as a power of two, and the way back to it. */
struct Size {
  float shrink, grow_a, grow_b;

  __device__ __forceinline__ explicit Size(float largest) {
    int32_t exponent = int32_t(bits_of(largest) >> 23) - 127;
    exponent = exponent < 126 ? exponent : 126;
    shrink = float_of(uint32_t(127 - exponent) << 23);
    grow_a = float_of(uint32_t(127 + exponent / 2) << 23);
    grow_b = float_of(uint32_t(127 + exponent - exponent / 2) << 23);
  }
  __device__ __forceinline__ uint32_t restored(float x, float unlift) const {
    const float own = x * grow_a * grow_b * unlift;
    const float most = float_of(0x7f7fffffu);
    return bits_of(most < own ? most : own);
  }
};

/** Butterflies kHalf apart, then those wider, below kEnd. */
template <int kHalf, int kEnd, int kDims>
__device__ __forceinline__ void butterflies(float (&y)[kDims]) {
  if constexpr (kHalf < kEnd) {
#pragma unroll
    for (int k = 0; k < kDims / 2; ++k) {
      const int i = k / kHalf * 2 * kHalf + k % kHalf;
      const float a = y[i], b = y[i + kHalf];
      y[i] = a + b;
      y[i + kHalf] = a - b;
    }
    butterflies<2 * kHalf, kEnd>(y);
  }
}

/** The CPU's fold of 16 lanes. */
template <int kHalf = 8>
__device__ __forceinline__ float fold(float (&t)[16]) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i) t[i] = t[i] + t[i + kHalf];
  if constexpr (kHalf > 1) return fold<kHalf / 2>(t);
  return t[0];
}

__device__ __forceinline__ float octet(const float (&t)[8]) {
  const float a = t[0] + t[4], b = t[1] + t[5], c = t[2] + t[6], d = t[3] + t[7];
  return (a + c) + (b + d);
}

/**
 * The Walsh-Hadamard transform. Of two neighbours, each ends with one half of their dimensions in
 * front, the first or the second one, and the other half behind it.
 */
template <int kParts, int kDims>
__device__ __forceinline__ void transform(float (&y)[kDims], int part) {
  if constexpr (kParts == 1) {
    butterflies<1, kDims>(y);
  } else {
    const float own = part % 2 == 0 ? 1.0f : -1.0f;
    butterflies<1, 8>(y);
#pragma unroll
    for (int d = 0; d < kDims; ++d) y[d] = fmaf(y[d], own, __shfl_xor_sync(kAllLanes, y[d], 1));
    butterflies<8, kDims / 2>(y);
#pragma unroll
    for (int d = 0; d < kDims / 2; ++d) {
      const float a = y[d], b = y[d + kDims / 2];
      y[d] = fmaf(b, own, a);
      y[d + kDims / 2] = fmaf(b, -own, a);
    }
  }
#pragma unroll
  for (int step = 2; step < kParts; step *= 2) {
    const float own = part / step % 2 == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int d = 0; d < kDims; ++d) y[d] = fmaf(y[d], own, __shfl_xor_sync(kAllLanes, y[d], step));
  }
}

/** Sum of squares in 16 lanes, element d in lane d % 16, one after the other. */
template <int kParts, int kDims>
__device__ __forceinline__ float sum_of_squares(const float (&y)[kDims]) {
  constexpr int kOwn = kParts == 1 ? 16 : 8;
  float lanes[16] = {};
#pragma unroll
  for (int d = 0; d < kDims; ++d) lanes[d % kOwn] = fmaf(y[d], y[d], lanes[d % kOwn]);
  if constexpr (kParts == 4) {  // the second half goes on where the first one ends
#pragma unroll
    for (int i = 0; i < 8; ++i) lanes[i] = __shfl_xor_sync(kAllLanes, lanes[i], 2);
#pragma unroll
    for (int d = 0; d < kDims; ++d) lanes[d % 8] = fmaf(y[d], y[d], lanes[d % 8]);
#pragma unroll
    for (int i = 0; i < 8; ++i) lanes[i] = __shfl_sync(kAllLanes, lanes[i], (threadIdx.x | 2) % 32);
  }
  if constexpr (kParts == 8) {  // the same, pair after pair
#pragma unroll
    for (int turn = 1; turn < 4; ++turn) {
      float before[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        before[i] = __shfl_sync(kAllLanes, lanes[i], (threadIdx.x + 30) % 32);
      }
#pragma unroll
      for (int d = 0; d < kDims; ++d) before[d % 8] = fmaf(y[d], y[d], before[d % 8]);
      const bool mine = threadIdx.x % 8 / 2 == turn;
#pragma unroll
      for (int i = 0; i < 8; ++i) lanes[i] = mine ? before[i] : lanes[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) lanes[i] = __shfl_sync(kAllLanes, lanes[i], (threadIdx.x | 6) % 32);
  }
  if constexpr (kParts > 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) lanes[8 + i] = __shfl_xor_sync(kAllLanes, lanes[i], 1);
  }
  return fold(lanes);
}

/** Each lane holds the numbers of one cell. */
struct Cells {
  float threshold, centre;

  __device__ __forceinline__ explicit Cells(const CodecTables& codec)
      : threshold(codec.cell_thresholds[threadIdx.x % 32]),
        centre(codec.cell_centres[threadIdx.x % 32]) {}
};

/** Bits of a where the mask has ones, else those of b. */
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  return ((a ^ b) & mask) ^ b;
}

/** Turns nibble j of word r, whose bit p is bit p of dimension 4 j + r, into bit 4 j + r of word p.
 */
__device__ __forceinline__ void to_planes(uint32_t (&w)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t a = w[i], b = w[i + 1];
    w[i] = select_bits(0x55555555u, a, b << 1);
    w[i + 1] = select_bits(0x55555555u, a >> 1, b);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = w[i], b = w[i + 2];
    w[i] = select_bits(0x33333333u, a, b << 2);
    w[i + 2] = select_bits(0x33333333u, a >> 2, b);
  }
}

/** A lane's part of a key: plane by plane, then the weights. */
struct Codes {
  uint32_t signs[kWords];
  uint32_t record[4 * kWords];
  uint8_t norm;
  uint16_t scale;
  bool valid;  // else the key has to take the careful way
  bool tame;   // else it has to if an element is smaller than kLeastElement, and not zero
};

/** What becomes of a lane's dimensions: signs, levels, and weights still to be scaled. */
struct Quantiser {
  const Cells& cells;
  float unrotate;
  Codes& codes;
  float least_square = infinity();
  float heaviest = 0;
  float weights[4 * kWords];

  __device__ __forceinline__ void octet_of(const float* y, int b, uint32_t (&nibbles)[4],
                                           uint32_t& negative) {
    float terms[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) terms[j] = y[j] * y[j];
    const float square = octet(terms);  // r_b^2
    least_square = fminf(least_square, square);
    const float inverse_radius = ptx::rsqrt_approx_ftz(square);
    const float radius = root(square, inverse_radius);
    const float cells_per_unit = inverse_radius * kCells;
#pragma unroll
    for (int j = 7; j >= 0; --j) {
      const float magnitude = fabsf(y[j]);
      float cell = fmaf(magnitude, cells_per_unit, kRounder);
      const float threshold = __shfl_sync(kAllLanes, cells.threshold, bits_of(cell));
      if (magnitude >= threshold * radius) cell += 1.0f;
      terms[j] = __shfl_sync(kAllLanes, cells.centre, bits_of(cell)) * magnitude;
      nibbles[j % 4] = (nibbles[j % 4] << 4) + bits_of(cell);
      negative = __funnelshift_l(bits_of(y[j]), negative, 1);
    }
    weights[b] = ratio(square, octet(terms)) * unrotate;
    heaviest = fmaxf(heaviest, weights[b]);
  }

  /** Dimensions 32 w and up. */
  __device__ __forceinline__ void word(const float* y, int w) {
    // What the rounder's own bits, and cells being one above levels, add to every nibble.
    constexpr uint32_t kExcess = (kRounderBits + 1) * 0x11111111u;
    uint32_t nibbles[4] = {}, negative = 0;
#pragma unroll
    for (int b = 3; b >= 0; --b) octet_of(y + 8 * b, 4 * w + b, nibbles, negative);
#pragma unroll
    for (int r = 0; r < 4; ++r) nibbles[r] -= kExcess;
    to_planes(nibbles);
    codes.signs[w] = ~negative;
#pragma unroll
    for (int p = 0; p < 3; ++p)
      codes.record[p * kWords + w] = nibbles[p] | nibbles[3];  // 8 and up are 7
  }

  /** Weights as shares of the scale. */
  __device__ __forceinline__ void scale_weights(float scale) {
    const float per_weight = ratio(255.0f, scale);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes[i] = bits_of(weights[4 * w + i] * per_weight + kRounder);
      codes.record[3 * kWords + w] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040),
                                                 __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
    }
  }
};

/**
 * The elements of 16 bytes with the rotation's signs, which are factors where an element has 16
 * bits. Zeros end as plus zero: then no butterfly ends at minus zero either.
 */
__device__ __forceinline__ void turned(const uint4& chunk, const uint4 (&flips)[1], float (&y)[4],
                                       float) {
  y[0] = float_of(chunk.x ^ flips[0].x), y[1] = float_of(chunk.y ^ flips[0].y);
  y[2] = float_of(chunk.z ^ flips[0].z), y[3] = float_of(chunk.w ^ flips[0].w);
}
__device__ __forceinline__ void turned(const uint4& chunk, const uint4 (&flips)[1], float (&y)[8],
                                       __half) {
  const auto& words = reinterpret_cast<const __half2(&)[4]>(chunk);
  const auto& factors = reinterpret_cast<const __half2(&)[4]>(flips);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(__hfma2(words[i], factors[i], __half2{}));
    y[2 * i] = pair.x;
    y[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void turned(const uint4& chunk, const uint4 (&flips)[2], float (&y)[8],
                                       __nv_bfloat16) {
  // A factor's lower half is zero; the upper half of what comes out is a float's.
  const auto& words = reinterpret_cast<const __nv_bfloat162(&)[4]>(chunk);
  const auto& factors = reinterpret_cast<const __nv_bfloat162(&)[2][4]>(flips);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 even = __hfma2(__low2bfloat162(words[i]), factors[0][i], __nv_bfloat162{});
    const __nv_bfloat162 odd = __hfma2(words[i], factors[1][i], __nv_bfloat162{});
    y[2 * i] = float_of(reinterpret_cast<const uint32_t&>(even));
    y[2 * i + 1] = float_of(reinterpret_cast<const uint32_t&>(odd));
  }
}

/** The same of what a mean leaves: gains, then shifts, which the rotation's signs are in. */
template <typename Element, int kFactors>
__device__ __forceinline__ void leave(const uint4& chunk, const uint4 (&factors)[kFactors],
                                      float (&y)[kElementsPer16<Element>]) {
  static_assert(kFactors == 2 * kElementsPer16<Element> / 4);
  const auto& elements = reinterpret_cast<const Element(&)[kElementsPer16<Element>]>(chunk);
  const auto& numbers = reinterpret_cast<const float (&)[2][kElementsPer16<Element>]>(factors);
#pragma unroll
  for (int i = 0; i < kElementsPer16<Element>; ++i) {
    y[i] = fmaf(to_float(elements[i]), numbers[0][i], numbers[1][i]);
  }
}

/** Bytes of two lanes' words, in turn: the key's own order. */
__device__ __forceinline__ void interleave(uint32_t* words, int part) {
  const uint32_t own = words[0], other = __shfl_xor_sync(kAllLanes, words[1], 1);
  words[0] = __byte_perm(own, other, part % 2 == 0 ? 0x5140 : 0x1504);
  words[1] = __byte_perm(own, other, part % 2 == 0 ? 0x7362 : 0x3726);
}

/**
 * The quick way.
 * @param chunks   the elements of this lane's subspaces
 * @param factors  (kChunks, kFactors, kParts) of all lanes
 */
template <typename Cut>
__device__ __forceinline__ void encode_quickly(const uint4 (&chunks)[Cut::kChunks],
                                               const uint4* factors, float unrotate,
                                               const Cells& cells, Codes& codes) {
  using Element = typename Cut::Element;
  constexpr bool kWide = std::is_same_v<Element, float> || Cut::kLeaves;
  constexpr int kDims = Cut::kDims, kParts = Cut::kParts, kPer16 = kElementsPer16<Element>;
  const int part = int(threadIdx.x) % kParts;

  float y[kDims];
#pragma unroll
  for (int c = 0; c < Cut::kChunks; ++c) {
    uint4 flips[Cut::kFactors];
#pragma unroll
    for (int f = 0; f < Cut::kFactors; ++f) {
      flips[f] = factors[(c * Cut::kFactors + f) * kParts + part];
    }
    auto& own = reinterpret_cast<float (&)[kPer16]>(y[c * kPer16]);
    if constexpr (Cut::kLeaves) {
      leave<Element>(chunks[c], flips, own);
    } else {
      turned(chunks[c], flips, own, Element{});
    }
  }
  codes.valid = codes.tame = true;
  float largest = 1.0f;
  if constexpr (kWide) {
    largest = largest_of(y);
#pragma unroll
    for (int step = 1; step < kParts; step *= 2) {
      largest = larger_magnitude(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    codes.valid = ordinary(largest);
  }
  const Size size(largest);
  if constexpr (kWide) {
#pragma unroll
    for (int d = 0; d < kDims; ++d) y[d] = y[d] * size.shrink + 0.0f;
  }
  if constexpr (!kWide && std::is_same_v<Element, __nv_bfloat16>) {
    constexpr int kFirst = kParts == 1 ? 16 : 8;  // terms that sums begin with
    float least = infinity();
#pragma unroll
    for (int d = 0; d < kFirst; ++d) least = fminf(least, fabsf(y[d]));
    // Zeros do no harm, and a channel may be dead.
    if (!__all_sync(kAllLanes, least >= kLeastElement)) {
      least = infinity();
#pragma unroll
      for (int d = 0; d < kFirst; ++d) {
        if (y[d] != 0) least = fminf(least, fabsf(y[d]));
      }
    }
    codes.tame = least >= kLeastElement || part >= 2;
  }
  const float square = sum_of_squares<kParts>(y);
  if constexpr (!kWide) {
    codes.valid = square >= kLeastNormSquare && square < kMostNormSquare;
  }
  const float norm = root(square, ptx::rsqrt_approx_ftz(square));
  transform<kParts>(y, part);

  Quantiser quantiser{cells, unrotate, codes};
#pragma unroll
  for (int w = 0; w < kWords; ++w) quantiser.word(y + 32 * w, w);

  float heaviest = quantiser.heaviest;
#pragma unroll
  for (int step = 1; step < kParts; step *= 2) {
    heaviest = fmaxf(heaviest, __shfl_xor_sync(kAllLanes, heaviest, step));
  }
  if (!(quantiser.least_square >= kLeastSquare * fmaxf(square, 1.0f))) codes.valid = false;
  const float scale = float_of(scale_bits(scale_code(bits_of(heaviest))));
  codes.norm = norm_code(kWide ? size.restored(norm, 1.0f) : bits_of(norm));
  codes.scale = scale_code(kWide ? size.restored(scale, 1.0f) : bits_of(scale));
  quantiser.scale_weights(scale);
  if constexpr (kParts > 1) {
    interleave(codes.signs, part);
#pragma unroll
    for (int plane = 0; plane < 4; ++plane) interleave(codes.record + plane * kWords, part);
  }
}

}  // namespace pariskv::cuda::device
