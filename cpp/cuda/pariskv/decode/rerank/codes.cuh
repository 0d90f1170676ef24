/**
 * 4-bit codes of keys times queries, on the tensor cores: magnitudes and weights become halves in
 * registers, a tile of keys at a time. Definitions are in codes_impl.cuh.
 */
#pragma once

#include <cstdint>

namespace pariskv::cuda::device {

/** Words of the sign bytes and planes of a key that a lane works on; four lanes share a key. */
template <int kWords>
constexpr int kLaneWords = kWords <= 4 ? 1 : kWords / 4;

/**
 * Magnitudes as halves: byte l of the pairs of words is the upper, or lower, byte of level l. The
 * levels are halves exactly (codec/levels.cpp).
 */
struct LevelTable {
  uint32_t upper[2], lower[2];

  /**
   * The words for every lane. They are the same, but what is known to be the same stays in uniform
   * registers, and has to be moved for each look-up.
   */
  using Copies = uint32_t[4][32];

  /** By all threads. To be followed by a barrier. */
  static __device__ __forceinline__ void copy(const float* centres, Copies& to);
  __device__ __forceinline__ void load(const Copies& from);
};

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
  __device__ __forceinline__ void load(const float* rotated);
};

}  // namespace pariskv::cuda::device
