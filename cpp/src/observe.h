/**
 * Attention in whole numbers, for choices that outlive a step: a near-tie must not be decided one
 * way by one backend and another way by the next. Logits are steps of 1/64 octave (octaves.h), a
 * weight is 2^(steps / 64) in units of 2^-24 of the largest one's, a share is a weight of the sum
 * of all in units of 2^-34. Sums of whole numbers have no order.
 */
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>

namespace pariskv {

/** The logit of a key that a query does not see. */
constexpr int32_t kNoLogit = -(int32_t{1} << 30);

constexpr int kWeightBits = 24;
constexpr int kShareBits = 34;
/** A share p of all attention is so many 2^-20. */
constexpr int kTopPBits = 20;
/** Queries at most: the sum of their shares, with a position of 23 bits behind it, fits 64 bits. */
constexpr int64_t kMostObservers = 64;

/** Of logits 0 to 63 steps below the largest one. */
constexpr std::array<uint32_t, 64> weight_table() {
  constexpr double kStep = 0.98922801319397548;  // 2^(-1/64)
  std::array<uint32_t, 64> table{};
  double weight = 1 << kWeightBits;
  for (uint32_t& entry : table) {
    entry = uint32_t(weight + .5);
    weight *= kStep;
  }
  return table;
}
constexpr std::array<uint32_t, 64> kWeights = weight_table();

/** The weight of a logit so many steps below the largest one. */
inline uint32_t weight_of(int32_t below) {
  return below >= 64 * (kWeightBits + 1) ? 0 : kWeights[size_t(below & 63)] >> (below >> 6);
}

/** What turns weights of this sum to shares; 0 for none. */
inline uint64_t reciprocal_of(uint64_t sum) { return sum == 0 ? 0 : (uint64_t{1} << 63) / sum; }

inline uint64_t share_of(uint32_t weight, uint64_t reciprocal) {
  return weight * reciprocal >> (63 - kShareBits);
}

/**
 * How many of the largest shares make up p of all, at most `most`. Reorders them.
 * @param p  in units of 2^-kTopPBits
 */
inline int64_t top_p_count(uint64_t* shares, int64_t count, uint32_t p, int64_t most) {
  uint64_t all = 0;
  for (int64_t i = 0; i < count; ++i) all += shares[i];
  const uint64_t wanted = (all * p + (uint64_t{1} << kTopPBits) - 1) >> kTopPBits;
  if (count > most) {
    std::nth_element(shares, shares + most, shares + count, std::greater<uint64_t>());
    count = most;
  }
  std::sort(shares, shares + count, std::greater<uint64_t>());
  uint64_t sum = 0;
  int64_t taken = 0;
  while (taken < count && sum < wanted) sum += shares[taken++];
  return taken;
}

}  // namespace pariskv
