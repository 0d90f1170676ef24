/**
 * 4-bit codes of keys times queries, on the tensor cores: magnitudes and weights become halves in
 * registers, a tile of keys at a time.
 */
#pragma once

#include <cstdint>

#include "device/numbers.cuh"
#include "device/partition.cuh"
#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/zone.cuh"

namespace pariskv::cuda::device {

/** Where a key's summary is. */
struct alignas(16) KeyPlace {
  const uint8_t* block;  // null: it has none, zeros come for it
  int slot;
  int candidate;  // among those of its head; below 0: sample -1 - candidate
};

/**
 * How the code of a key lies in shared memory: record, sign bytes, scale; all of it comes in pieces
 * of 16 bytes, with its neighbours there.
 */
template <int kWords>
struct CodeLayout {
  static constexpr int kSignsAt = 16 * kWords;
  static constexpr int kSignPieces = kWords <= 4 ? 1 : kWords / 4;
  static constexpr int kScaleAt = kSignsAt + 16 * kSignPieces;
  static constexpr int kPieces = kWords + kSignPieces + 1;
  static constexpr int kPitch = 16 * (kPieces | 1);  // odd: neighbouring keys in other banks
  static constexpr int kLanes = kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;  // that bring one key

  static __device__ __forceinline__ int signs(int slot) {
    return kSignsAt + (kWords == 2 ? 8 * (slot & 1) : 0);
  }
  static __device__ __forceinline__ int scale(int slot) { return kScaleAt + 2 * (slot & 7); }
};

/** Candidates that are brought at a time: as many as there is room for. */
template <int kWords>
constexpr int kGathered = kWords == 16  ? 64
                          : kWords == 8 ? 128
                                        : 256;
template <int kWords>
constexpr int kGatherBytes = 2 * kGathered<kWords> * CodeLayout<kWords>::kPitch;

/**
 * Codes of candidates, scattered over device memory, on their way to shared memory: many small
 * copies at once, some candidates ahead. A thread copies one piece of every code.
 */
template <int kWords>
class Gather {
  using Layout = CodeLayout<kWords>;

 public:
  __device__ __forceinline__ explicit Gather(const Zone& zone) {
    const int piece = int(threadIdx.x) % Layout::kLanes;
    has_ = piece < Layout::kPieces;
    const bool record = piece < kWords, sign = !record && piece < kWords + Layout::kSignPieces;
    plane_ = record ? zone.layout.records_at(zone.head, 0) + 16 * piece
             : sign ? zone.layout.signs_at(zone.head, 0) + 16 * (piece - kWords)
                    : zone.layout.scales_at(zone.head, 0);
    step_ = record ? 16 * kWords : sign ? 4 * kWords : 2;
  }

  /** Sets codes of `count` candidates on their way. All threads. */
  __device__ __forceinline__ void start(const KeyPlace* places, int count, char* to) const {
    if (!has_) return;
    constexpr int kStep = kThreads / Layout::kLanes;
    const int first = int(threadIdx.x) / Layout::kLanes;
    uint32_t target =
        shared_address(to) + first * Layout::kPitch + 16 * (int(threadIdx.x) % Layout::kLanes);
#pragma unroll 4
    for (int i = first; i < count; i += kStep) {
      const KeyPlace place = places[i];
      ptx::cp_async_cg_16(target, place.block + plane_ + ((place.slot * step_) & ~15),
                          place.block != nullptr);
      target += kStep * Layout::kPitch;
    }
  }

 private:
  bool has_;
  int64_t plane_;  // of a block: where the code of the first key is
  int step_;       // bytes from key to key
};

/** Words of the sign bytes and planes of a key that a lane works on; four lanes share a key. */
template <int kWords>
constexpr int kLaneWords = kWords <= 4 ? 1 : kWords / 4;

/** Four of the eight bytes of a pair of words: which ones, say the digits of `places`, 0 to 7. */
__device__ __forceinline__ uint32_t bytes_at(const uint32_t (&pair)[2], uint32_t places) {
  return ptx::prmt(pair[0], pair[1], places);
}

/**
 * Magnitudes as halves: byte l of the pairs of words is the upper, or lower, byte of level l. The
 * levels are halves exactly (policy/pariskv/codec/levels.cpp).
 */
struct LevelTable {
  uint32_t upper[2], lower[2];

  /**
   * The words for every lane. They are the same, but the compiler would leave words that it knows
   * to be the same in uniform registers, and move them for each look-up.
   */
  using Copies = uint32_t[4][32];

  /** By all threads. To be followed by a barrier. */
  static __device__ __forceinline__ void copy(const float* centres, Copies& to) {
    const int word = warp_id();
    if (word >= 4) return;
    uint32_t bytes = 0;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const uint32_t bits = __half_as_ushort(__float2half_rn(centres[word / 2 * 4 + l]));
      bytes |= (word % 2 == 0 ? bits >> 8 : bits & 255) << 8 * l;
    }
    to[word][lane_id()] = bytes;
  }
  __device__ __forceinline__ void load(const Copies& from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      upper[i] = from[2 * i][lane_id()];
      lower[i] = from[2 * i + 1][lane_id()];
    }
  }
};

/** Two halves in a word. */
__device__ __forceinline__ __half2 halves_of(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}

__device__ __forceinline__ uint32_t bits_of(__half2 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/**
 * 32 dimensions of a key in bits. Pair (j, r) is dimensions 8 j + r and 8 j + 4 + r, of subspace j,
 * for r under 4.
 */
struct CodeBits {
  uint32_t codes[4];  // of [r]: nibble k is the level of dimension 4 k + r
  uint32_t signs[2];  // of 16 dimensions: bit r of byte k is that of dimension 4 k + r
  uint32_t weights;

  __device__ __forceinline__ void load(const uint32_t (&planes)[3], uint32_t sign_bits,
                                       uint32_t weight_bytes) {
    // Bit d of three planes to nibble d / 4 of codes[d % 4]: two exchanges of index bits.
    constexpr uint32_t kEven = 0x55555555, kLow = 0x33333333;
    const uint32_t even01 = (planes[0] & kEven) | (planes[1] << 1 & ~kEven);
    const uint32_t odd01 = (planes[0] >> 1 & kEven) | (planes[1] & ~kEven);
    const uint32_t even2 = planes[2] & kEven, odd2 = planes[2] >> 1 & kEven;
    codes[0] = (even01 & kLow) | (even2 << 2 & ~kLow);
    codes[1] = (odd01 & kLow) | (odd2 << 2 & ~kLow);
    codes[2] = (even01 >> 2 & kLow) | (even2 & ~kLow);
    codes[3] = (odd01 >> 2 & kLow) | (odd2 & ~kLow);
    const uint32_t first = __byte_perm(~sign_bits, 0, 0x4140);
    const uint32_t second = __byte_perm(~sign_bits, 0, 0x4342);
    signs[0] = (first | first << 4) & 0x0f0f0f0fu;
    signs[1] = (second | second << 4) & 0x0f0f0f0fu;
    weights = weight_bytes;
  }

  /** The weight of a subspace twice: a byte in the mantissa of 1024 is that number more. */
  __device__ __forceinline__ __half2 weight(int j) const {
    const uint32_t more = __byte_perm(weights, 0x64646464, 0x4040 + 0x0101 * j);
    return __hsub2(halves_of(more), halves_of(0x64006400));
  }

  /** Pairs (2 half, r) and (2 half + 1, r) of signed levels. */
  __device__ __forceinline__ void levels(const LevelTable& table, int half, int r,
                                         uint32_t (&out)[2]) const {
    const uint32_t four = codes[r] >> 16 * half;
    const uint32_t lower = bytes_at(table.lower, four);
    const uint32_t upper = bytes_at(table.upper, four) ^ (signs[half] << (7 - r) & 0x80808080u);
    out[0] = __byte_perm(lower, upper, 0x5140);
    out[1] = __byte_perm(lower, upper, 0x7362);
  }
};

/** a b = most + rest, in each half: exactly, a product of 11 and 8 bits. */
__device__ __forceinline__ void split_product(uint32_t a, __half2 b, uint32_t& most,
                                              uint32_t& rest) {
  const __half2 product = __hmul2_rn(halves_of(a), b);
  most = bits_of(product);
  rest = bits_of(__hfma2(halves_of(a), b, __hneg2(product)));
}

/** The first terms of two numbers, or the rest. */
__device__ __forceinline__ uint32_t pair_of(float a, float b, bool rest) {
  __half2 pair = __floats2half2_rn(a, b);
  if (rest) {
    const float2 first = __half22float2(pair);
    pair = __floats2half2_rn(a - first.x, b - first.y);
  }
  return bits_of(pair);
}

/**
 * Four queries of a head as halves, in two terms: lane 4 g + t has the 32 dimensions of word t, and
 * of every fourth word after it, of column g: the first term of query g or the second of query
 * g - 4. Entry 4 j + r, for r under 4, is the pair of dimensions 8 j + r and 8 j + 4 + r of a word.
 * Queries are brought to numbers of size 1 to 2 by a power of two.
 */
template <int kWords>
struct EstimateQueries {
  uint32_t pairs[kLaneWords<kWords>][16];
  float size[2];  // that power, of queries 2 (t % 2) and 2 (t % 2) + 1

  /** Floats from word to word, and from query to query: lanes meet different banks. */
  static constexpr int kWordPitch = 36;
  static constexpr int kPitch = kWordPitch * kWords + (kWords == 4 ? 0 : 16);
  static __device__ __forceinline__ int at(int d) { return d / 32 * kWordPitch + d % 32; }

  /**
   * By all lanes of each warp.
   * @param rotated  (4, kPitch) in shared memory: dimension d of a query, times what turns weights
   *                 and centres into logits, is at `at(d)`
   */
  __device__ __forceinline__ void load(const float* rotated) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const float* mine = rotated + g % 4 * kPitch;
    float values[kLaneWords<kWords>][32];
#pragma unroll
    for (int u = 0; u < kLaneWords<kWords>; ++u) {
      const int word = t + 4 * u;
#pragma unroll
      for (int d = 0; d < 32; d += 4) {
        float4 four = make_float4(0, 0, 0, 0);
        if (word < kWords) {
          four = *reinterpret_cast<const float4*>(mine + kWordPitch * word + d);
        }
        values[u][d] = four.x, values[u][d + 1] = four.y;
        values[u][d + 2] = four.z, values[u][d + 3] = four.w;
      }
    }
    float largest = 0;
#pragma unroll
    for (int u = 0; u < kLaneWords<kWords>; ++u) {
#pragma unroll
      for (int d = 0; d < 32; ++d) largest = fmaxf(largest, fabsf(values[u][d]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // Between 2^-126 and 2^126, so that there is an inverse.
    const uint32_t exponent = min(max(bits_of(largest) >> 23, 1u), 253u);
    const float power = float_of(exponent << 23), inverse = float_of((254 - exponent) << 23);
#pragma unroll
    for (int u = 0; u < kLaneWords<kWords>; ++u) {
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        const int d = 8 * (p / 4) + p % 4;
        pairs[u][p] = pair_of(values[u][d] * inverse, values[u][d + 4] * inverse, g >= 4);
      }
    }
    size[0] = __shfl_sync(~0u, power, 8 * (t % 2));
    size[1] = __shfl_sync(~0u, power, 8 * (t % 2) + 4);
  }
};

/** Adds 32 dimensions of keys g and g + 8 of a tile: sums of columns 2 t and 2 t + 1 for each. */
__device__ __forceinline__ void multiply_codes(const CodeBits (&keys)[2], const LevelTable& table,
                                               const uint32_t (&query)[16], float (&sums)[4],
                                               float (&rests)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __half2 weights[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weights[i][0] = keys[i].weight(2 * half);
      weights[i][1] = keys[i].weight(2 * half + 1);
    }
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      uint32_t levels[2][2][2];  // of key, of pair r or r + 1, of subspace
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        keys[i].levels(table, half, r, levels[i][0]);
        keys[i].levels(table, half, r + 1, levels[i][1]);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t most[4], rest[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            split_product(levels[i][pair][k], weights[i][k], most[2 * pair + i],
                          rest[2 * pair + i]);
          }
        }
        const int at = 4 * (2 * half + k) + r;
        ptx::mma_m16n8k16_f16(sums, most, query[at], query[at + 1]);
        ptx::mma_m16n8k16_f16(rests, rest, query[at], query[at + 1]);
      }
    }
  }
}

/** The bits of word `word` of a key; zeros where it has no such word. */
template <int kWords>
__device__ __forceinline__ void load_codes(const char* code, int slot, int word, CodeBits& out) {
  using Layout = CodeLayout<kWords>;
  const auto at = [&](int offset) {
    return word < kWords ? *reinterpret_cast<const uint32_t*>(code + offset + 4 * word) : 0;
  };
  const uint32_t planes[3] = {at(0), at(4 * kWords), at(8 * kWords)};
  out.load(planes, at(Layout::signs(slot)), at(12 * kWords));
}

}  // namespace pariskv::cuda::device
