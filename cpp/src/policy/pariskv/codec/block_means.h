/**
 * The second codec: what is left of a key without the mean of its neighbours, its channels
 * balanced. Two identities, which hold whatever the data:
 *
 *   <q, k> = <S q, k / S>                            S: a positive factor per channel
 *   <q, k> = <q, m> + <q, k - m>                     m: the mean of a block of neighbours
 *
 * A key is encoded as k / S - c - m. The centre c is the mean of the zone's first k / S, in 15 bits
 * a channel, and m that of the block's k / S - c, in 8 bits. What is rounded is subtracted, so
 * nothing is lost. S makes loud what queries ask for and keys say quietly: without it, the signs of
 * a key are those of channels that no query reads. Without c, a channel with a large bias would
 * set the steps of every channel in m.
 *
 * Backends that decide otherwise in the last bit pick other candidates: every sum below has the
 * order of its loop, in doubles, and every operation rounds once. So it is with squares of queries,
 * whose sums over a window are floats.
 */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "octaves.h"

namespace pariskv {

/**
 * Keys of a zone's beginning that set its balance, at least, and what their last is aligned to. A
 * text may begin with hundreds of equal tokens, which say nothing of the rest: so many more.
 */
constexpr int64_t kLeastBalanceKeys = 960;
constexpr int64_t kBalanceGrain = 256;

/**
 * Queries that are looked at, in windows: the last so many positions before each of the last
 * multiples of the grain, as many as there are windows. A window that came whole counts, so that a
 * prompt which ends before the zone opens has a say.
 */
constexpr int64_t kBalanceQueries = 16;
constexpr int64_t kBalanceWindows = 4;

/** A channel is never quieter than this part of the loudest one, as a square. */
constexpr double kQuietest = 0x1p-20;

/**
 * S within these factors of the median. A channel that was quiet may wake up: the smaller its S
 * was, the more it then drowns the others.
 */
constexpr double kLeastStretch = 0x1p-3;
constexpr double kMostStretch = 0x1p6;

/** Levels of a mean's channels; of the queries that they are multiplied with, and of a centre's. */
constexpr float kMeanLevels = 127;
constexpr float kFineLevels = 16383;

/** What a query makes of a sign, next to what it makes of the dimension: measured. */
constexpr float kSignGain = 0.875f;

/** Blocks whose logits are summed by themselves before they are added to others. */
constexpr int64_t kChunkBlocks = 64;

/**
 * S of one channel, before the median is divided out.
 * @param keys     the mean square of the channel over keys, less their means
 * @param queries  that of queries, in any unit; 0: no queries were seen
 */
inline double raw_stretch(double keys, double queries) {
  if (queries > 0) return std::sqrt(std::sqrt(keys / queries));
  const double root = std::sqrt(std::sqrt(keys));
  return root * std::sqrt(root);
}

/** Mean squares, with a floor relative to the largest; false: they say nothing. */
inline bool lift_quiet(double* squares, int64_t channels) {
  double largest = 0;
  for (int64_t c = 0; c < channels; ++c) {
    if (!std::isfinite(squares[c])) return false;
    largest = std::max(largest, squares[c]);
  }
  if (!(largest > 0)) return false;
  for (int64_t c = 0; c < channels; ++c) squares[c] = std::max(squares[c], largest * kQuietest);
  return true;
}

/**
 * The balance of a head.
 * @param keys     (channels) mean squares of residuals; overwritten
 * @param queries  (channels) sums of squares; overwritten. Null: none were seen
 * @param stretch, gain  (channels) written
 */
inline void set_stretch(double* keys, double* queries, int64_t channels, float* stretch,
                        float* gain) {
  if (!lift_quiet(keys, channels)) {
    std::fill_n(stretch, channels, 1.0f);
    std::fill_n(gain, channels, 1.0f);
    return;
  }
  const bool has_queries = queries != nullptr && lift_quiet(queries, channels);
  for (int64_t c = 0; c < channels; ++c)
    keys[c] = raw_stretch(keys[c], has_queries ? queries[c] : 0);
  // The median, by rank: ties count by their order.
  double median = 1;
  for (int64_t c = 0; c < channels; ++c) {
    int64_t rank = 0;
    for (int64_t o = 0; o < channels; ++o)
      rank += keys[o] < keys[c] || (keys[o] == keys[c] && o < c);
    if (rank == channels / 2) median = keys[c];
  }
  for (int64_t c = 0; c < channels; ++c) {
    stretch[c] = float(std::clamp(keys[c] / median, kLeastStretch, kMostStretch));
    gain[c] = 1.0f / stretch[c];
  }
}

/** The step of which the largest magnitude is `levels`. At `most` a level times it is a float. */
inline float rounding_step(double largest, float levels, double most) {
  return float(std::min(largest / double(levels), most));
}

/** A number in whole steps, halves to even: at most `levels` either way. */
inline double rounded_level(double number, float step, float levels) {
  if (step == 0) return 0;
  return std::clamp(std::nearbyint(number / double(step)), -double(levels), double(levels));
}

/** Of a block's mean, balanced, and of a channel of it. */
inline float mean_step(double largest) { return rounding_step(largest, kMeanLevels, 0x1p121); }
inline int8_t mean_level(double mean, float step) {
  return int8_t(rounded_level(mean, step, kMeanLevels));
}

/** The same of a centre. */
inline float centre_step(double largest) { return rounding_step(largest, kFineLevels, 0x1p114); }
inline int16_t centre_level(double mean, float step) {
  return int16_t(rounded_level(mean, step, kFineLevels));
}

/** The logit of a block's mean and the centre, in steps. */
constexpr int32_t joined_steps(int32_t block, int32_t centre) {
  const int32_t most = int32_t(kMostSteps), sum = block + centre;
  return sum > most ? most : sum < -most ? -most : sum;
}

}  // namespace pariskv
