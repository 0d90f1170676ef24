/**
 * A budget by error: rows are taken in the order of their worth until the variance is small enough
 * that the sample adds for the candidates that are left. A row that is drawn with one chance in w,
 * and then counts for w, adds (w - 1) p^2 of it, p being its share of a head's attention.
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
  uint64_t may_stay;  // squares of candidates that may be left
  int64_t least;      // rows that are taken whatever is left

  /**
   * @param error     that may be left; 0: there is no budget, what is left is to be known
   * @param weight    keys that a row of the sample stands for
   * @param resident  sum of shares over the finite heads
   * @param finite    how many of `group` are
   */
  static constexpr ErrorBudget of(double error, float weight, uint64_t resident, int64_t finite,
                                  int64_t group) {
    const uint64_t all = kAllMass * uint64_t(finite) / uint64_t(group);
    ErrorBudget budget{resident / uint64_t(group), all, 0, 0, INT64_MAX};
    if (finite == 0) return budget;
    // A sample of all keys estimates nothing.
    const double others = weight > 1 ? double(weight) - 1 : 0;
    budget.per_square = others * double(group) / double(finite) / double(kAllSquare);
    if (error == 0) return budget;
    budget.least = kLeastRows;
    const double squares = error * error / budget.per_square;
    budget.may_stay = squares < double(~uint64_t{0} / 2) ? uint64_t(squares) : ~uint64_t{0};
    return budget;
  }
  /** The share that `reached` is of all, as it is counted; where a head is finite. */
  constexpr int64_t counted(uint64_t reached) const {
    static_assert(DecodeCounts::kOne == 1 << 24 && kAllMass >> 40 == 1, "20 and 4 bits");
    const int64_t share = int64_t((reached << 20) / (all >> 4));
    return share < DecodeCounts::kOne ? share : DecodeCounts::kOne;
  }
  /** What the sample adds for candidates with so many squares: shares add up to 1 at most. */
  constexpr float variance(uint64_t left) const {
    return float(double(left < kAllSquare ? left : kAllSquare) * per_square);
  }
};

}  // namespace pariskv
