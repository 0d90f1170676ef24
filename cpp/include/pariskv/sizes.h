/**
 * The sizes there is code for, and the limits that follow. Lists and numbers alone, no functions:
 * files that are compiled for one instruction set include this too.
 */
#pragma once

#include <cstdint>

namespace pariskv {

/** A list of sizes, as a type. */
template <int64_t... kSizes>
struct Sizes {};

/** One of them, as an argument that a template can be made of. */
template <int64_t kSize>
struct Constant {
  static constexpr int64_t kValue = kSize;
};

/** What Config::head_dim and Config::value_dim may be. */
using HeadDims = Sizes<64, 80, 96, 128, 192, 256, 512>;
constexpr int64_t kMaxHeadDim = 512;

/** Keys are rotated in the next power of two of their dimensions. */
using RotatedDims = Sizes<64, 128, 256, 512>;
constexpr int64_t kMaxRotatedDim = 512;

/** The same with Scorer::kVotes: a score is a byte, and 64 subspaces could cast 384 votes. */
using VoteDims = Sizes<64, 128, 256>;
constexpr int64_t kMaxVoteDim = 256;

/**
 * Tokens of a sequence. Positions are kept in 32 bits, and the sum of norm^2 over a zone, a whole
 * number under 2^40 for each key, in 63.
 */
constexpr int64_t kMostTokens = int64_t{1} << 23;

}  // namespace pariskv
