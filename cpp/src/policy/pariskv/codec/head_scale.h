/**
 * The scale that a group's heads share in the coarse score: how far a key's logit lies above the
 * log-sum-exp of the head's whole row of logits, in octaves (logits times log2(e)).
 *
 * A backend that decides otherwise in the last bit picks other candidates, so every operation here
 * rounds once, in this order; a GPU's decode/score and decode/window do the same.
 */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "octaves.h"
#include "pariskv/sizes.h"
#include "policy/pariskv/codec/block_means.h"
#include "policy/pariskv/codec/summary_layout.h"
#include "policy/pariskv/jobs.h"

namespace pariskv {

constexpr float kOctaves = 1.44269504f;     // log2(e): octaves per logit
constexpr float kNatural = 0.693147f;       // ln(2)
constexpr float kTwoNatural = 1.386294f;    // 2 ln(2)
constexpr float kHalfOctaves = 0.721348f;   // log2(e) / 2
constexpr float kSignVariance = 0.125939f;  // (1 - 2 / pi) ln(2) / 2, see HeadScale::variance_term
constexpr float kSignReach = 2.0f;          // spreads, see reached_variance
constexpr float kHeadStart = 0.6f;          // spreads that an unsure head is ahead
constexpr float kLeastSpread = 0x1p-6f;     // flatter heads are not magnified
constexpr float kBlockReach = 4.0f;         // spreads from a block's mean to its best keys
constexpr float kInvisible = -30.0f;        // octaves; less adds nothing
constexpr float kMostOctave = 32.0f;        // score steps: of flat heads an octave is more

/** Resident rows that are looked at: the first ones, and the last before the newest token. */
constexpr int64_t kFirstRows = 16;
constexpr int64_t kLastRows = 112;
constexpr int64_t kWindowRows = kFirstRows + kLastRows;

/** Their logits are whole steps of 1/64 octave, see octaves.h. */
constexpr float kLogitOfStep = 0.0108304248f;  // ln(2) / 64

/** log2 of a positive number, a line from power to power: up to .09 too little. */
inline float rough_log2(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t one = (bits & 0x7fffffu) | 0x3f800000u;
  float significand;
  std::memcpy(&significand, &one, sizeof significand);
  return float(int32_t(bits >> 23) - 127) + (significand - 1.0f);
}

/** Its inverse, for x up to 0. */
inline float rough_exp2(float x) {
  if (!(x >= kInvisible)) return 0.0f;
  const float whole = std::floor(x);
  return std::ldexp(1.0f + (x - whole), int(whole));
}

/** The log-sum-exp of logits in steps, as octaves; none: minus infinity. */
inline float sum_of_steps(const int32_t* steps, int64_t count) {
  if (count == 0) return -std::numeric_limits<float>::infinity();
  const int32_t most = *std::max_element(steps, steps + count);
  int32_t sum = 0;  // in units of 2^-16 of the largest
  for (int64_t i = 0; i < count; ++i) {
    const int32_t less = most - steps[i];
    if (less < 1024) sum += ((64 + (-less & 63)) << 10) >> ((less + 63) >> 6);
  }
  return float(most) * 0x1p-6f + (rough_log2(float(sum)) - 16.0f);
}

/**
 * The logits of a head's blocks, by their means, in steps: sums of whole numbers, so that no order
 * matters, over chunks of kChunkBlocks and then over these.
 */
struct BlockSums {
  int64_t blocks = 0;
  int64_t sum = 0;
  int64_t squares = 0;
  int32_t most = -(int32_t{1} << 30);
  int64_t weight = 0;  // the sum of 2^(steps / 64), in units of 2^-16 of that of the largest

  /** How much less a number with so many steps less is: a line from power to power. */
  static constexpr int64_t lowered(int64_t number, int32_t less) {
    const int shift = (less + 63) >> 6;
    return shift > 40 ? 0 : (number * (64 + (-less & 63))) >> (6 + shift);
  }

  /** The blocks of one chunk. */
  static BlockSums of_chunk(const int32_t* steps, int64_t count) {
    BlockSums out;
    out.blocks = count;
    out.most = *std::max_element(steps, steps + count);
    for (int64_t b = 0; b < count; ++b) {
      out.sum += steps[b];
      out.squares += int64_t{steps[b]} * steps[b];
      out.weight += lowered(1 << 16, out.most - steps[b]);
    }
    return out;
  }

  /** Those of a chunk as well; `most` is that of all already. */
  void add(const BlockSums& chunk) {
    blocks += chunk.blocks;
    sum += chunk.sum;
    squares += chunk.squares;
    weight += lowered(chunk.weight, most - chunk.most);
  }
};

/** What is known of the keys of one kv head, for all who search it. */
struct KeyMeans {
  int64_t usable;
  double inverse;                        // 1 / usable
  double mean_square;                    // of norms, in units of kNormUnit^2
  const int64_t* sums;                   // (rotated_dim) of norm * sign, in units of kNormUnit;
                                         // null: keys are told from the means of their blocks
  int64_t mean_squares[kMaxRotatedDim];  // (rotated_dim) of their means to the nearest unit

  KeyMeans(const KeyStatistics& statistics, int64_t head, int64_t rotated_dim)
      : usable(statistics.usable[head]),
        inverse(1.0 / double(usable)),
        mean_square(double(statistics.square_units[head]) * inverse),
        sums(statistics.sums == nullptr ? nullptr : statistics.sums + head * rotated_dim) {
    for (int64_t d = 0; sums != nullptr && d < rotated_dim; ++d) {
      const int64_t mean = usable > 0 ? int64_t(std::nearbyint(double(sums[d]) * inverse)) : 0;
      mean_squares[d] = mean * mean;
    }
  }
};

/**
 * Where a head's logits lie, in octaves. By the signs of a key, a logit is slope * dot * norm, give
 * or take what signs do not tell; since that is exponentiated, a long key is worth variance_term *
 * norm^2 more on the average.
 */
struct HeadScale {
  bool whole = false;  // the query is finite; the rest is 0 otherwise
  float slope = 0;
  float variance_term = 0;
  float mean = 0;  // of the zone's keys
  float spread = 0;
  float total = 0;  // the log-sum-exp of zone and window, less the head's start
  float top = -std::numeric_limits<float>::infinity();  // of the best block's keys; else unknown
};

/**
 * The scale of a query.
 * @param quantised  (rotated_dim) -15 to 15
 * @param largest    of the rotated query's elements, without the 1 / sqrt of the rotation
 * @param window     log-sum-exp of the resident rows
 */
inline HeadScale head_scale(const KeyMeans& keys, const int8_t* quantised, int64_t rotated_dim,
                            float largest, float scale, float window) {
  HeadScale out;
  out.whole = true;
  if (keys.usable == 0) {  // no score to be had
    out.total = std::numeric_limits<float>::infinity();
    return out;
  }
  int64_t dot = 0, square = 0, common = 0;
  for (int64_t d = 0; d < rotated_dim; ++d) {
    const int64_t q = quantised[d];
    dot += keys.sums[d] * q;
    square += q * q;
    common += q * q * keys.mean_squares[d];
  }
  const double mean = double(dot) * keys.inverse * kNormUnit;
  const double variance = std::max(double(square) * keys.mean_square - double(common), 0.0);
  constexpr double kSquareUnit = kNormUnit * kNormUnit;

  out.slope = scale * (largest / float(kQueryLevels)) * (kOctaves / float(rotated_dim));
  const float square_slope = out.slope * out.slope;
  out.variance_term = square_slope * float(square) * kSignVariance;
  out.mean = out.slope * float(mean) + out.variance_term * float(keys.mean_square * kSquareUnit);
  out.spread = std::sqrt(square_slope * float(variance * kSquareUnit));

  // The sum over normally distributed logits, none of which lies further out than the best of that
  // many is likely to.
  const float keys_log = rough_log2(float(keys.usable));
  const float reach = std::min(out.spread * kNatural, std::sqrt(keys_log * kTwoNatural));
  const float zone = out.mean + reach * out.spread - reach * reach * kHalfOctaves + keys_log;

  const float more = window > zone ? window : zone, less = window > zone ? zone : window;
  out.total = more + rough_exp2(less - more);
  return out;
}

/**
 * The part of a variance term that counts. An exponential gains from all that signs do not tell
 * while that is little. Of a sharp head it is tens of octaves, of which no key gains more than
 * kSignReach spreads give: the whole term would rank keys by their norms alone.
 */
inline float reached_variance(float variance_term, float mean_square) {
  const float variance = variance_term * mean_square * kTwoNatural;  // of logits
  if (!(variance > kSignReach * kSignReach)) return variance_term;
  const float part = kSignReach / std::sqrt(variance);
  return variance_term * (part * (2.0f - part));
}

/**
 * The same where keys are told from the means of their blocks: the zone is a mixture of blocks,
 * each of which has its mean's logit, and the same spread around it.
 */
inline HeadScale head_scale(const KeyMeans& keys, const BlockSums& sums, const int8_t* quantised,
                            int64_t rotated_dim, float largest, float scale, float window) {
  HeadScale out;
  out.whole = true;
  if (keys.usable == 0) {
    out.total = std::numeric_limits<float>::infinity();
    return out;
  }
  int64_t square = 0;
  for (int64_t d = 0; d < rotated_dim; ++d) square += int64_t{quantised[d]} * quantised[d];
  const float slope = scale * (largest / float(kQueryLevels)) * (kOctaves / float(rotated_dim));
  const float square_slope = slope * slope;
  const float mean_square = float(keys.mean_square * (kNormUnit * kNormUnit));
  out.slope = slope * kSignGain;
  out.variance_term = reached_variance(square_slope * float(square) * kSignVariance, mean_square);

  const double one = 1.0 / double(sums.blocks);
  const double mean = double(sums.sum) * one;
  const double variance = std::max(double(sums.squares) * one - mean * mean, 0.0);
  const float within = square_slope * float(square) * mean_square;
  const float inner = std::sqrt(within);
  out.mean = float(mean * 0x1p-6) + out.variance_term * mean_square;
  out.spread = std::sqrt(within + float(variance * 0x1p-12));

  const float best = float(sums.most) * 0x1p-6f;
  const float keys_log = rough_log2(float(keys.usable));
  const float reach = std::min(inner * kNatural, std::sqrt(keys_log * kTwoNatural));
  const float average =
      best + (rough_log2(float(sums.weight)) - 16.0f) - rough_log2(float(sums.blocks));
  const float zone = average + reach * inner - reach * reach * kHalfOctaves + keys_log;
  out.top = best + kBlockReach * inner;

  // The wider signs leave a head's logits, the more of its keys have to be candidates until its
  // best keys are among them.
  const float more = window > zone ? window : zone, less = window > zone ? zone : window;
  out.total = more + rough_exp2(less - more) - kHeadStart * inner;
  return out;
}

/**
 * A key's score for two heads together: about log2(2^a + 2^b), in three lines. Scores are bytes. A
 * group's are joined by twos, fours and eights, then eights in turn; a head that is missing in a
 * four scores 0, and a usable key's eight 1 at least.
 * @param octave  steps by which two equal scores are more than one
 */
constexpr int32_t joined_score(int32_t a, int32_t b, int32_t octave) {
  return std::min(255, std::max(std::max(a, b), ((a + b + 1) >> 1) + octave));
}

/** How many times the scores of so many heads are joined, one after the other. */
constexpr int32_t score_joins(int64_t searchers) {
  return searchers <= 1 ? 0 : searchers <= 4 ? 2 : int32_t(3 + (searchers - 1) / 8);
}

/**
 * Turns the scales of a group's heads to scores, slope * dot * norm + variance_term * norm^2 +
 * offset rounded down: kScoreSteps of them to a spread of the leading head, the one whose average
 * key has the largest share of its attention; that key scores kScoreShift * kScoreSteps. A query
 * that is not finite scores every key the least, so that the others' scores stand.
 * Where the best block lies so far above the average that the joined scores of its keys would pass
 * 255, all scores are lowered: keys far below it may be alike, the best ones may not.
 * @param scales              (searchers)
 * @param slope, variance_term, offset  (searchers) written
 * @param per_step            (searchers) written: of a block's logit in steps; null: no blocks
 * @return  the steps of an octave with which their scores are joined
 */
inline int32_t score_lines(const HeadScale* scales, int64_t searchers, float* slope,
                           float* variance_term, float* offset, float* per_step) {
  constexpr float kMiddle = float(kScoreShift * kScoreSteps);
  float anchor = -std::numeric_limits<float>::infinity(), spread = kLeastSpread;
  for (const HeadScale* s = scales; s < scales + searchers; ++s) {
    if (!s->whole || !(s->mean - s->total > anchor)) continue;
    anchor = s->mean - s->total;
    spread = std::max(s->spread, kLeastSpread);
  }
  const float per_octave = float(kScoreSteps) / spread;
  const float octave = searchers > 1 ? std::nearbyint(std::min(per_octave, kMostOctave)) : 0.0f;
  float top = -std::numeric_limits<float>::infinity();  // of any head's keys, as shares
  for (const HeadScale* s = scales; s < scales + searchers; ++s) {
    if (s->whole) top = std::max(top, s->top - s->total);
  }
  const float most = 255.0f - kMiddle - octave * float(score_joins(searchers));
  const float excess = (top - anchor) * per_octave - most;
  const float middle = excess > 0 && std::isfinite(excess) ? kMiddle - excess : kMiddle;
  for (int64_t i = 0; i < searchers; ++i) {
    slope[i] = variance_term[i] = offset[i] = 0;
    if (per_step != nullptr) per_step[i] = 0;
    if (!scales[i].whole) continue;
    slope[i] = scales[i].slope * per_octave;
    variance_term[i] = scales[i].variance_term * per_octave;
    offset[i] = middle - (scales[i].total + anchor) * per_octave;
    if (per_step != nullptr) per_step[i] = per_octave * 0x1p-6f;
    if (std::isfinite(slope[i]) && std::isfinite(variance_term[i]) && std::isfinite(offset[i]))
      continue;
    slope[i] = variance_term[i] = 0;  // nothing can be said of its keys
    if (per_step != nullptr) per_step[i] = 0;
    offset[i] = kMiddle;
  }
  return int32_t(octave);
}

}  // namespace pariskv
