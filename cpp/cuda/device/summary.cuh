/**
 * The arithmetic of a summary, bit for bit that of cpu/plain/encode.cpp, for ordinary keys: a key
 * (half a key at 256 dimensions) per lane in registers, so that butterflies, norm and subspaces
 * need no neighbour, and what a key needs once is computed once. summary_careful.cuh does the rest.
 */
#pragma once

#include <type_traits>

#include "device/numbers.cuh"

namespace pariskv::cuda::device {

constexpr unsigned kAllLanes = 0xffffffffu;

// |u| is cut into cells of this many to a radius: cell 0 holds no threshold, cells 1 to 7 one
// each, well inside, and what lies above is level 7. So a cell found roughly, one lookup and
// one exact comparison give the level.
constexpr float kCells = 1 / 0.095f;
constexpr float kCellMargin = 0.1f;  // of a cell: how far inside

// 1.5 * 2^23: adding it rounds to a whole number, which then lies in the lowest bits.
constexpr float kRounder = 12582912.0f;
constexpr uint32_t kRounderBits = 0x4b400000u;

// Below this square of a radius the short forms of square root and division do not hold.
constexpr float kLeastSquare = 0x1p-60f;

/** The constants of the codec, as the summaries' arithmetic wants them. */
struct CodecTables {
  int32_t head_dim;
  int32_t rotated_dim;
  float unrotate;  // 1 / sqrt(rotated_dim)
  float thresholds[7];
  float centres[8];
  uint32_t negative[8];  // bit d % 32 of word d / 32: rotation sign d is -1
  // The same as 4 bytes of a row want it: what to flip in their elements.
  uint32_t flips[256];
};

/** How a tile of keys, one warp's work, is cut. */
template <typename Element_, int kRotated_>
struct Cut {
  using Element = Element_;
  static constexpr int kRotated = kRotated_;
  static constexpr int kParts = kRotated > 128 ? 2 : 1;  // lanes of a key
  static constexpr int kDims = kRotated / kParts;        // of a lane
  static constexpr int kKeys = 32 / kParts;
  static constexpr int kChunks = kDims * int(sizeof(Element)) / 16;  // of 16 bytes, of a lane
  static constexpr int kWords = kDims / 32;                          // of a lane's bit plane
  static constexpr int kRecord = kWords * kParts;                    // 16 bytes, of a key
};

__device__ __forceinline__ float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/** a / b, rounded correctly, for numbers whose quotient is far from overflow and underflow. */
__device__ __forceinline__ float ratio(float a, float b) {
  float y = inverse(b);
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
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(most), "f"(fabsf(x)));
  return y;
}
template <typename Pair>
__device__ __forceinline__ Pair larger_magnitude(Pair most, Pair x) {
  return __hmax2_nan(most, __habs2(x));
}

template <typename Pair, int kWords>
__device__ __forceinline__ float largest_of_pairs(const uint32_t (&words)[kWords]) {
  Pair most[4];  // chains of their own, so that none has to wait
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const Pair pair = reinterpret_cast<const Pair&>(words[i]);
    most[i % 4] = i < 4 ? __habs2(pair) : larger_magnitude(most[i % 4], pair);
  }
  const Pair pair = __hmax2_nan(__hmax2_nan(most[0], most[1]), __hmax2_nan(most[2], most[3]));
  return larger_magnitude(to_float(pair.x), to_float(pair.y));
}

/** The largest magnitude of a lane's elements; NaN when one is. */
template <typename Element, int kWords>
__device__ __forceinline__ float largest_of(const uint32_t (&words)[kWords]) {
  if constexpr (std::is_same_v<Element, float>) {
    float most[4] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      most[i % 4] = larger_magnitude(most[i % 4], float_of(words[i]));
    }
    return larger_magnitude(larger_magnitude(most[0], most[1]), larger_magnitude(most[2], most[3]));
  } else if constexpr (std::is_same_v<Element, __half>) {
    return largest_of_pairs<__half2>(words);
  } else {
    return largest_of_pairs<__nv_bfloat162>(words);
  }
}

// Keys larger than this take the careful way. Below it no element of a 16-bit key that is not
// zero becomes zero by scaling, so that a zero's sign never matters.
template <typename Element>
constexpr float kLargestKey = 0x1p17f;
template <>
constexpr float kLargestKey<float> = 0x1p126f;

/** Whether the quick way holds for a key's largest magnitude. */
template <typename Element>
__device__ __forceinline__ bool ordinary(float largest) {
  return largest >= 0x1p-63f && largest < kLargestKey<Element>;
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

/** Butterflies kHalf apart, then those wider. */
template <int kHalf, int kDims>
__device__ __forceinline__ void butterflies(float (&y)[kDims]) {
  if constexpr (kHalf < kDims) {
#pragma unroll
    for (int k = 0; k < kDims / 2; ++k) {
      const int i = k / kHalf * 2 * kHalf + k % kHalf;
      const float a = y[i], b = y[i + kHalf];
      y[i] = a + b;
      y[i + kHalf] = a - b;
    }
    butterflies<2 * kHalf>(y);
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

/** Sum of squares in 16 lanes, element d in lane d % 16, one after the other. */
template <int kParts, int kDims>
__device__ __forceinline__ float sum_of_squares(const float (&y)[kDims], int part) {
  float lanes[16] = {};
#pragma unroll
  for (int d = 0; d < kDims; ++d) lanes[d % 16] = fmaf(y[d], y[d], lanes[d % 16]);
  if constexpr (kParts == 2) {  // the second half goes on where the first one ends
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float first = __shfl_xor_sync(kAllLanes, lanes[i], 1);
      lanes[i] = part == 0 ? lanes[i] : first;
    }
    float on[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) on[i] = lanes[i];
#pragma unroll
    for (int d = 0; d < kDims; ++d) on[d % 16] = fmaf(y[d], y[d], on[d % 16]);
#pragma unroll
    for (int i = 0; i < 16; ++i) lanes[i] = __shfl_sync(kAllLanes, on[i], (threadIdx.x | 1) % 32);
  }
  return fold(lanes);
}

/** Each lane holds what belongs to the cell of its number. */
struct Cells {
  float threshold;  // over the radius: none reaches infinity, all reach 0
  float centre;     // of the level that a magnitude has when it is one below the cell's number

  __device__ __forceinline__ explicit Cells(const CodecTables& codec) {
    const int lane = int(threadIdx.x) % 32;
    threshold = lane == 0 ? 0.0f : infinity();
    centre = codec.centres[0];
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      if (lane == i + 1) threshold = codec.thresholds[i];
      if (lane >= i + 2) centre = codec.centres[i + 1];
    }
  }
};

/** Turns nibble j of word r, whose bit p is bit p of dimension 4 j + r, into bit 4 j + r of word p.
 */
__device__ __forceinline__ void to_planes(uint32_t (&w)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t a = w[i], b = w[i + 1];
    w[i] = (a & 0x55555555u) | ((b << 1) & 0xaaaaaaaau);
    w[i + 1] = ((a >> 1) & 0x55555555u) | (b & 0xaaaaaaaau);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = w[i], b = w[i + 2];
    w[i] = (a & 0x33333333u) | ((b << 2) & 0xccccccccu);
    w[i + 2] = ((a >> 2) & 0x33333333u) | (b & 0xccccccccu);
  }
}

/** What a lane knows of its part of a key: plane by plane, then the weights. */
template <int kWords>
struct Codes {
  uint32_t signs[kWords];
  uint32_t record[4 * kWords];
  uint8_t norm;
  uint16_t scale;
  bool valid;  // else the key has to take the careful way
};

/** What the quick codes leave of 32 dimensions: signs, levels, and weights still to be scaled. */
template <int kWords>
struct Quantiser {
  const Cells& cells;
  float unrotate;
  Codes<kWords>& codes;
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
    const float inverse_radius = inverse_root(square);
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

/** The quick way; `words` are the elements of this lane's part. */
template <typename Cut>
__device__ __forceinline__ void encode_quickly(const uint4 (&chunks)[Cut::kChunks],
                                               const CodecTables& codec, const Cells& cells,
                                               Codes<Cut::kWords>& codes) {
  using Element = typename Cut::Element;
  constexpr int kDims = Cut::kDims;
  const int part = Cut::kParts == 1 ? 0 : int(threadIdx.x) % 2;

  float largest =
      largest_of<Element>(reinterpret_cast<const uint32_t (&)[4 * Cut::kChunks]>(chunks));
  if (Cut::kParts == 2) {
    largest = larger_magnitude(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  }
  const Size size(largest);

  float y[kDims];
  constexpr int kPer16 = kElementsPer16<Element>;
#pragma unroll
  for (int c = 0; c < Cut::kChunks; ++c) {
    const uint32_t* flips = codec.flips + part * 4 * Cut::kChunks + 4 * c;
    const uint4 flipped = {chunks[c].x ^ flips[0], chunks[c].y ^ flips[1], chunks[c].z ^ flips[2],
                           chunks[c].w ^ flips[3]};
    float x[kPer16];
    unpack<Element>(flipped, x);
#pragma unroll
    for (int i = 0; i < kPer16; ++i) {
      const int d = c * kPer16 + i;
      // Adding zero makes a plus of minus zero: then no butterfly ends at minus zero either.
      y[d] = fmaf(x[i], size.shrink, 0.0f);
      if constexpr (std::is_same_v<Element, float>) y[d] = y[d] + 0.0f;  // it may just have become
    }
  }
  const float square = sum_of_squares<Cut::kParts>(y, part);
  const float norm = root(square, inverse_root(square));
  butterflies<1>(y);
  if constexpr (Cut::kParts == 2) {
    const float own = part == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      y[d] = fmaf(y[d], own, __shfl_xor_sync(kAllLanes, y[d], 1));
    }
  }

  Quantiser<Cut::kWords> quantiser{cells, codec.unrotate, codes};
#pragma unroll
  for (int w = 0; w < Cut::kWords; ++w) quantiser.word(y + 32 * w, w);

  float heaviest = quantiser.heaviest, least_square = quantiser.least_square;
  if (Cut::kParts == 2) {
    heaviest = fmaxf(heaviest, __shfl_xor_sync(kAllLanes, heaviest, 1));
    least_square = fminf(least_square, __shfl_xor_sync(kAllLanes, least_square, 1));
  }
  const float scale = scale_of(scale_code(bits_of(heaviest)));
  codes.norm = norm_code(size.restored(norm, 1.0f));
  codes.scale = scale_code(size.restored(scale, 1.0f));
  codes.valid = ordinary<Element>(largest) && least_square >= kLeastSquare;
  quantiser.scale_weights(scale);
}

}  // namespace pariskv::cuda::device
