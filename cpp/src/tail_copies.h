/**
 * Copies of a tail's rows in 8 bits, side by side in a block: for each kv head the common part of
 * its rows, then (heads, capacity) rows. Of K and of V alike, channel by channel,
 *
 *   number = centre + unit * scale * level        scale: of the row's half
 *
 * so attention multiplies a query by the units once and adds <q, centre> to every logit, and the
 * weighted sum of values is multiplied and moved once, when all rows have been added. Keys of
 * pretrained models have channels that are hundreds of times as loud as the median. With a scale
 * alone, such a channel would take the levels from all the rest: a row's logit is then off by more
 * than one.
 *
 * Centre and unit come from the first rows of the tail, which are spread over the zone: rotary
 * positions turn a loud channel slowly, and a centre of the zone's beginning would not hold. They
 * follow from these rows alone, so they are the same whatever the history of a sequence.
 */
#pragma once

#include <cstdint>

#include "host_device.h"

namespace pariskv {

/** The common part of a head's K or V. */
struct CommonPart {
  float* centre;  // (dim)
  float* unit;    // (dim) powers of two, at most 1: products with them are exact
};

struct TailCopies {
  int64_t heads;
  int64_t capacity;  // rows of a head
  int64_t key_dim, value_dim;
  int64_t row_bytes;

  /** Bytes of a head's common part. */
  constexpr int64_t common_bytes() const {
    return 2 * (key_dim + value_dim) * int64_t(sizeof(float));
  }
  constexpr int64_t row_offset(int64_t head, int64_t i) const {
    return heads * common_bytes() + (head * capacity + i) * row_bytes;
  }
  constexpr int64_t bytes() const { return row_offset(heads, 0); }

  PKV_HOST_DEVICE CommonPart of_keys(char* block, int64_t head) const {
    auto* first = reinterpret_cast<float*>(block + head * common_bytes());
    return {first, first + key_dim};
  }
  PKV_HOST_DEVICE CommonPart of_values(char* block, int64_t head) const {
    auto* first = reinterpret_cast<float*>(block + head * common_bytes()) + 2 * key_dim;
    return {first, first + value_dim};
  }
};

/**
 * Rows are summed in so many strands, row i in strand i modulo them, in doubles; then the strands
 * in their order. A number that is not finite is left out, in its channel alone.
 */
constexpr int kCommonStrands = 32;

/** Of the policy's tail_rows at most, and so of rows that set the common part. */
constexpr int64_t kMostCommonRows = 8192;

/**
 * A row's loudness, from the bits of the largest finite magnitude of its half: an exponent. A row
 * that is 16 times as loud as the median one or more does not set the common part. A single key of
 * 1e30 would leave all other rows no bits.
 */
constexpr int loudness_of(uint32_t largest) { return int(largest >> 23 & 255); }
constexpr int kMostAboveMedian = 3;
constexpr bool is_common(int loudness, int median) { return loudness <= median + kMostAboveMedian; }

/** Rows that set the common part, in a tail of `count` rows. */
constexpr int64_t common_rows(int64_t count, int64_t tail_rows) {
  // A longer interval leaves nearly tail_rows at least: then it is always the same rows.
  const int64_t most = tail_rows - tail_rows / 16;
  return count < most ? count : most;
}

/** No unit follows from a channel whose numbers are all the same. */
constexpr int kNoUnitExponent = -(1 << 20);
/** A channel is at most so many octaves quieter than the median one: it may wake up. */
constexpr int kMostBelowMedian = 4;
/** Nor than the loudest one. */
constexpr int kLeastUnitExponent = -64;

/** Of the root of a variance, given its bits as a double: within a factor of the root of 2. */
constexpr int exponent_of_root(uint64_t variance) {
  const int biased = int(variance >> 52 & 0x7ff);
  return biased == 0 || biased == 0x7ff ? kNoUnitExponent : (biased - 1023 + 1) >> 1;
}

/** Of a channel's unit, beside the median and the largest of its head. */
constexpr int exponent_of_unit(int own, int median, int largest) {
  if (largest == kNoUnitExponent) return 0;
  const int least = (median == kNoUnitExponent ? largest : median) - kMostBelowMedian;
  const int exponent = (own < least ? least : own) - largest;
  return exponent < kLeastUnitExponent ? kLeastUnitExponent : exponent;
}

/** Finite numbers stay finite when the centre is taken off, and the unit. */
constexpr float kMostApart = 3.402823466e38f;
constexpr float held(float x) {
  return x < -kMostApart ? -kMostApart : x > kMostApart ? kMostApart : x;
}
/** Every operation rounds once. What is not finite becomes NaN. */
constexpr float affine(float x, float factor, float added) {
  return held(x * factor + added) + (x - x);
}
constexpr float without_common(float x, float centre, float unit) {
  return held(held(x - centre) * (1.0f / unit)) + (x - x);
}

}  // namespace pariskv
