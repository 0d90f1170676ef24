/**
 * The error that a sample adds to a step, and a budget by it.
 *
 * Before rows are drawn: a key that is drawn with one chance in w, and then counts for w, adds
 * (w - 1) p^2 to the variance, p being its share of a head's attention. Rows are taken in the order
 * of their worth until that is small enough for the candidates that are left, an eighth of an
 * octave of worth at a time, so that a cut is found by adding up once.
 *
 * After they are drawn: each row of the sample has a share s = w p of the output, by its exact
 * logit. The sum of s^2 over these rows, times 1 - 1 / w, estimates the same variance over all keys
 * that are left, candidates or not, and is large in the very steps in which a heavy key was drawn.
 * A heavy candidate that was not drawn is missing from it, and adds p^2.
 *
 * Shares and squares are whole numbers, so the order of a sum cannot matter: on every device the
 * same rows of equal worths and squares are taken.
 */
#pragma once

#include <cstdint>

#include "ops.h"

namespace pariskv {

/** All of the attention, in units of a row's share. */
constexpr uint64_t kAllMass = uint64_t{1} << 40;
/**
 * The square of all of the attention, in units of a row's square. A million rows fit that have all
 * of it each: where logits are so large that their log-sum-exp has no place for more than one.
 */
constexpr uint64_t kAllSquare = uint64_t{1} << 44;
/** Rows that a budget takes in any case: the estimate of their shares is not to be trusted alone.
 */
constexpr int64_t kLeastRows = 16;

/**
 * Worths in eighths of octaves, from 2^-16 to 1. The first bin has all rows that are worth less:
 * where a budget asks for some of these it gets as many as there may be.
 */
constexpr int kWorthBins = 128;
constexpr int kWorthShift = 20;  // of a float's bits
constexpr uint32_t kWorthLow = ((127u - 16u) << 23) - (1u << kWorthShift);

/** @param bits  of a float that is not negative */
constexpr int worth_bin(uint32_t bits) {
  const uint32_t bin = bits < kWorthLow ? 0 : (bits - kWorthLow) >> kWorthShift;
  return int(bin < kWorthBins ? bin : kWorthBins - 1);
}
/** Bits of the least worth in a bin that is not the first. */
constexpr uint32_t least_of_bin(int bin) { return kWorthLow + (uint32_t(bin) << kWorthShift); }

/**
 * Estimated logits are off like normal numbers, whatever the keys: the spread is this times the
 * length of the rotated query, as estimates take it, times the scale of the key's weights. So the
 * square of a share is on average that of a logit which is higher by the square of its spread.
 */
constexpr float kEstimateNoise = 0.0184f * 255;

/** A share in units; nothing of what is no number. */
constexpr uint64_t mass_of(float share) {
  return share > 0 ? uint64_t((share < 2 ? share : 2.0f) * float(kAllMass)) : 0;
}

/** The mean of the heads' squared shares, in units. */
constexpr uint64_t square_of(float square) {
  return square > 0 ? uint64_t((square < 1 ? square : 1.0f) * float(kAllSquare)) : 0;
}

/** The budget of a kv head. Query heads whose sums are not finite are in none of these numbers. */
struct ErrorBudget {
  uint64_t resident;  // share of the resident rows
  uint64_t all;       // of the finite heads: kAllMass if all are finite, 0 if none is
  double per_square;  // variance of a row that is left, for each unit of its square
  double drawn;       // the same once rows are drawn, for the squares of their shares
  double rest;        // squares of all keys that are no candidates
  uint64_t may_stay;  // squares of candidates that may be left
  int64_t least;      // rows that are taken whatever is left

  /** Sums over the finite heads of a group. */
  struct Heads {
    int64_t finite, group;
    uint64_t resident;  // shares of resident rows
    uint64_t sampled;   // squares of some keys that are no candidates
    float keys;         // of how many each of these is one
  };

  /**
   * @param error   that may be left; 0: there is no budget, what is left is to be known
   * @param weight  keys that a row of the sample stands for
   */
  static constexpr ErrorBudget of(double error, float weight, const Heads& heads) {
    // Divisions of 64 bits are long on a GPU: there are few of them.
    const bool all_finite = heads.finite == heads.group;
    const double one = 1 / double(heads.group);
    const uint64_t all =
        all_finite ? kAllMass : kAllMass * uint64_t(heads.finite) / uint64_t(heads.group);
    ErrorBudget budget{uint64_t(double(heads.resident) * one), all, 0, 0, 0, 0, INT64_MAX};
    if (heads.finite == 0) return budget;
    // A sample of all keys estimates nothing.
    const double others = weight > 1 ? double(weight) - 1 : 0;
    const double each = all_finite ? 1 : double(heads.group) / double(heads.finite);
    budget.per_square = others * each / double(kAllSquare);
    budget.drawn = budget.per_square / double(weight);
    budget.rest = double(heads.sampled) * double(heads.keys) * one;
    if (error == 0) return budget;
    budget.least = kLeastRows;
    const double squares = error * error / budget.per_square;
    // No row takes the rest away. Where it has more than half of the budget, as much may stay of
    // candidates: more rows would not even halve the variance.
    const double rest = budget.rest < squares ? budget.rest : squares;
    const double left = squares - rest > rest ? squares - rest : rest;
    budget.may_stay = left < double(~uint64_t{0} / 2) ? uint64_t(left) : ~uint64_t{0};
    return budget;
  }
  /** The share that `reached` is of all, as it is counted; where a head is finite. */
  constexpr int64_t counted(uint64_t reached) const {
    static_assert(DecodeCounts::kOne == 1 << 24 && kAllMass >> 40 == 1, "20 and 4 bits");
    const int64_t share = int64_t(all == kAllMass ? reached >> 16 : (reached << 20) / (all >> 4));
    return share < DecodeCounts::kOne ? share : DecodeCounts::kOne;
  }
  /** The variance that a sample is expected to add, before rows are drawn. */
  constexpr float expected(uint64_t left) const {
    const double squares = double(left) + rest, most = double(kAllSquare);
    return float((squares < most ? squares : most) * per_square);
  }
  /**
   * The variance that the sample has added: shares add up to 1 at most.
   * @param left    squares of the candidates that are left
   * @param shares  squares of the shares that the sample's rows have of the output
   */
  constexpr float variance(uint64_t left, uint64_t shares) const {
    const uint64_t most = left > shares ? left : shares;
    return float(double(most < kAllSquare ? most : kAllSquare) * drawn);
  }
};

}  // namespace pariskv
