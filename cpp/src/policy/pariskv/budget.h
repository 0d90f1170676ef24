/**
 * A budget by mass: rows are taken in the order of their worth until what is attended to exactly
 * has so large a share of the attention, as the search estimates it. Shares are whole numbers, so
 * the order of a sum cannot matter: on every device the same rows of equal worths are taken.
 */
#pragma once

#include <cstdint>

#include "ops.h"

namespace pariskv {

/** All of the attention, in units of a row's share. */
constexpr uint64_t kAllMass = uint64_t{1} << 40;
/** A budget that is never reached: rows are taken as without one, and their share is known. */
constexpr uint64_t kEndlessMass = ~uint64_t{0};

/** A share in units; nothing of what is no number. */
constexpr uint64_t mass_of(float share) {
  return share > 0 ? uint64_t((share < 2 ? share : 2.0f) * float(kAllMass)) : 0;
}

/** What the setting says: 0 is no budget. */
constexpr uint64_t budget_of(double mass) {
  if (mass >= 1) return kEndlessMass;
  const uint64_t units = uint64_t(mass * double(kAllMass));
  return units > 0 ? units : 1;
}

/** The budget of a kv head. Query heads whose sums are not finite are in none of these numbers. */
struct MassBudget {
  uint64_t resident;  // share of the resident rows
  uint64_t all;       // of the finite heads: kAllMass if all are finite, 0 if none is
  uint64_t wanted;    // rows are taken until there is as much

  /**
   * @param budget    of all the attention: see budget_of
   * @param resident  sum over the finite heads
   * @param finite    how many of `group` are
   */
  static constexpr MassBudget of(uint64_t budget, uint64_t resident, int64_t finite,
                                 int64_t group) {
    const uint64_t heads = uint64_t(group), some = uint64_t(finite);
    const bool endless = budget == kEndlessMass || finite == 0;
    return {resident / heads, kAllMass * some / heads,
            endless ? kEndlessMass : budget * some / heads};
  }
  /** The share that `reached` is of all, as it is counted; where a head is finite. */
  constexpr int64_t counted(uint64_t reached) const {
    static_assert(DecodeCounts::kAllMass == 1 << 24 && kAllMass >> 40 == 1, "20 and 4 bits");
    const int64_t share = int64_t((reached << 20) / (all >> 4));
    return share < DecodeCounts::kAllMass ? share : DecodeCounts::kAllMass;
  }
};

}  // namespace pariskv
