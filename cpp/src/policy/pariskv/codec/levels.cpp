// The density of t = |u_j| is proportional to (1 - t^2)^(5/2), whose integrals are closed forms.
#include "pariskv/codec.h"

#include <cmath>

namespace pariskv {

namespace {

/** The integral of (1 - t^2)^(5/2) from 0 to t. */
double mass(double t) {
  const double c = std::sqrt(1 - t * t);
  return t * c * (c * c * c * c / 6 + 5 * c * c / 24 + 5.0 / 16) + 5.0 / 16 * std::asin(t);
}

/** The integral of t (1 - t^2)^(5/2) from 0 to t, less a constant. */
double moment(double t) { return -std::pow(1 - t * t, 3.5) / 7; }

/** To the 11 bits of a half's significand. */
double rounded(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
}

MagnitudeLevels derive() {
  MagnitudeLevels levels{};
  for (int l = 0; l < 8; ++l) levels.centres[l] = (l + .5) / 8;
  // Lloyd's alternation: borders halfway between centres, centres at their cells' means. Each
  // round shrinks the error by a fixed factor; this many leave none in a double.
  for (int round = 0; round < 4000; ++round) {
    for (int l = 0; l < 7; ++l) {
      levels.thresholds[l] = (levels.centres[l] + levels.centres[l + 1]) / 2;
    }
    for (int l = 0; l < 8; ++l) {
      const double low = l == 0 ? 0 : levels.thresholds[l - 1];
      const double high = l == 7 ? 1 : levels.thresholds[l];
      levels.centres[l] = (moment(high) - moment(low)) / (mass(high) - mass(low));
    }
  }
  // Eleven bits: a weight of eight times such a centre is exact in floats, and in two halves. Where
  // exactly a centre lies in its cell does not matter; weights make up for the difference.
  for (double& centre : levels.centres) centre = rounded(centre);
  return levels;
}

}  // namespace

const MagnitudeLevels& magnitude_levels() {
  static const MagnitudeLevels levels = derive();
  return levels;
}

}  // namespace pariskv
