/**
 * The scale that a group's heads share in the coarse score: how far a key's logit lies above the
 * log-sum-exp of the head's whole row of logits, in octaves (logits times log2(e)).
 *
 * A backend that decides otherwise in the last bit picks other candidates, so every operation here
 * rounds once, in this order. A GPU calls the same formulas, with sums of its own.
 */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "host_device.h"
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
PKV_HOST_DEVICE inline float rough_log2(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t one = (bits & 0x7fffffu) | 0x3f800000u;
  float significand;
  std::memcpy(&significand, &one, sizeof significand);
  return float(int32_t(bits >> 23) - 127) + (significand - 1.0f);
}

/** Its inverse, for x up to 0. */
PKV_HOST_DEVICE inline float rough_exp2(float x) {
  if (!(x >= kInvisible)) return 0.0f;
  const float whole = std::floor(x);
  const uint32_t bits = uint32_t(127 + int32_t(whole)) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return (1.0f + (x - whole)) * power;
}

/** What a logit counts that is so many steps below the largest: in units of 2^-16 of that one. */
constexpr int32_t window_weight(int32_t less) {
  return less < 1024 ? ((64 + (-less & 63)) << 10) >> ((less + 63) >> 6) : 0;
}

/** The log-sum-exp in octaves of logits in steps: of the largest, and the sum of their weights. */
PKV_HOST_DEVICE inline float log_of_weights(int32_t most, float weight) {
  return float(most) * 0x1p-6f + (rough_log2(weight) - 16.0f);
}

/** The log-sum-exp of logits in steps, as octaves; none: minus infinity. */
inline float sum_of_steps(const int32_t* steps, int64_t count) {
  if (count == 0) return -std::numeric_limits<float>::infinity();
  const int32_t most = *std::max_element(steps, steps + count);
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += window_weight(most - steps[i]);
  return log_of_weights(most, float(sum));
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

/** What every scale needs of the keys of one kv head. */
struct KeyNumbers {
  int64_t usable;
  double inverse;      // 1 / usable; none: 0
  double mean_square;  // of norms, in units of kNormUnit^2

  PKV_HOST_DEVICE static KeyNumbers of(int64_t usable, int64_t square_units) {
    const double inverse = usable > 0 ? 1.0 / double(usable) : 0.0;
    return {usable, inverse, double(square_units) * inverse};
  }

  /** The mean of their signs times norms in one dimension, to the nearest unit. */
  PKV_HOST_DEVICE int64_t nearest_mean(int64_t sum) const {
    return int64_t(std::nearbyint(double(sum) * inverse));
  }
};

/** Sums over the dimensions of a quantised query, -15 to 15. */
struct QuerySums {
  int64_t square;
  int64_t dot;     // with the sums of keys; 0 where there are blocks
  int64_t common;  // squares, times the squared means of keys; 0 where there are blocks
};

/** What is known of the keys of one kv head, for all who search it. */
struct KeyMeans : KeyNumbers {
  const int64_t* sums;                   // (rotated_dim) of norm * sign, in units of kNormUnit;
                                         // null: keys are told from the means of their blocks
  int64_t mean_squares[kMaxRotatedDim];  // (rotated_dim) of their means to the nearest unit

  KeyMeans(const KeyStatistics& statistics, int64_t head, int64_t rotated_dim)
      : KeyNumbers(KeyNumbers::of(statistics.usable[head], statistics.square_units[head])),
        sums(statistics.sums == nullptr ? nullptr : statistics.sums + head * rotated_dim) {
    for (int64_t d = 0; sums != nullptr && d < rotated_dim; ++d) {
      const int64_t mean = nearest_mean(sums[d]);
      mean_squares[d] = mean * mean;
    }
  }

  QuerySums sums_with(const int8_t* quantised, int64_t rotated_dim) const {
    QuerySums out{};
    for (int64_t d = 0; d < rotated_dim; ++d) {
      const int64_t q = quantised[d];
      out.square += q * q;
      if (sums == nullptr) continue;
      out.dot += sums[d] * q;
      out.common += q * q * mean_squares[d];
    }
    return out;
  }
};

/**
 * Where a head's logits lie, in octaves. By the signs of a key, a logit is slope * dot * norm, give
 * or take what signs do not tell; since that is exponentiated, a long key is worth variance_term *
 * norm^2 more on the average. An aggregate without defaults, for a GPU's shared memory.
 */
struct HeadScale {
  bool whole;  // the query is finite; the rest does not count otherwise
  float slope;
  float variance_term;
  float mean;  // of the zone's keys
  float spread;
  float total;  // the log-sum-exp of the zone; after add_window of the window too, less the start
  float start;  // that an unsure head has
  float top;    // of the best block's keys; minus infinity: unknown

  /** Of a query without keys: no score to be had. */
  PKV_HOST_DEVICE static HeadScale of_none() {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return {true, 0, 0, 0, 0, kInfinity, 0, -kInfinity};
  }

  /** @param window  log-sum-exp of the resident rows; minus infinity: they are not looked at */
  PKV_HOST_DEVICE void add_window(float window) {
    const float more = window > total ? window : total, less = window > total ? total : window;
    total = more + rough_exp2(less - more) - start;
  }
};

/** Octaves of a logit in dot * norm; a step of the quantised query is `step` of the rotated one. */
PKV_HOST_DEVICE inline float slope_of(float scale, float step, int64_t rotated_dim) {
  return scale * step * (kOctaves / float(rotated_dim));
}

/**
 * The log-sum-exp of so many normally distributed logits, none of which lies further out than the
 * best of that many is likely to.
 */
PKV_HOST_DEVICE inline float log_of_normal(float mean, float spread, int64_t keys) {
  const float keys_log = rough_log2(float(keys));
  const float reach = std::min(spread * kNatural, std::sqrt(keys_log * kTwoNatural));
  return mean + reach * spread - reach * reach * kHalfOctaves + keys_log;
}

/** The scale of a query over the zone, by sums over its keys. */
PKV_HOST_DEVICE inline HeadScale scale_of_zone(const KeyNumbers& keys, const QuerySums& query,
                                               float slope) {
  HeadScale out = HeadScale::of_none();
  if (keys.usable == 0) return out;
  constexpr double kSquareUnit = kNormUnit * kNormUnit;
  const double mean = double(query.dot) * keys.inverse * kNormUnit;
  const double variance =
      std::max(double(query.square) * keys.mean_square - double(query.common), 0.0);
  const float square_slope = slope * slope;
  out.slope = slope;
  out.variance_term = square_slope * float(query.square) * kSignVariance;
  out.mean = slope * float(mean) + out.variance_term * float(keys.mean_square * kSquareUnit);
  out.spread = std::sqrt(square_slope * float(variance * kSquareUnit));
  out.total = log_of_normal(out.mean, out.spread, keys.usable);
  return out;
}

/**
 * The part of a variance term that counts. An exponential gains from all that signs do not tell
 * while that is little. Of a sharp head it is tens of octaves, of which no key gains more than
 * kSignReach spreads give: the whole term would rank keys by their norms alone.
 */
PKV_HOST_DEVICE inline float reached_variance(float variance_term, float mean_square) {
  const float variance = variance_term * mean_square * kTwoNatural;  // of logits
  if (!(variance > kSignReach * kSignReach)) return variance_term;
  const float part = kSignReach / std::sqrt(variance);
  return variance_term * (part * (2.0f - part));
}

/**
 * The same where keys are told from the means of their blocks: the zone is a mixture of blocks,
 * each of which has its mean's logit, and the same spread around it.
 * @param square  of the quantised query
 */
PKV_HOST_DEVICE inline HeadScale scale_of_blocks(const KeyNumbers& keys, const BlockSums& blocks,
                                                 int64_t square, float slope) {
  HeadScale out = HeadScale::of_none();
  if (keys.usable == 0) return out;
  const float square_slope = slope * slope;
  const float mean_square = float(keys.mean_square * (kNormUnit * kNormUnit));
  out.slope = slope * kSignGain;
  out.variance_term = reached_variance(square_slope * float(square) * kSignVariance, mean_square);

  const double one = 1.0 / double(blocks.blocks);
  const double mean = double(blocks.sum) * one;
  const double variance = std::max(double(blocks.squares) * one - mean * mean, 0.0);
  const float within = square_slope * float(square) * mean_square;
  const float inner = std::sqrt(within);
  out.mean = float(mean * 0x1p-6) + out.variance_term * mean_square;
  out.spread = std::sqrt(within + float(variance * 0x1p-12));

  const float average =
      log_of_weights(blocks.most, float(blocks.weight)) - rough_log2(float(blocks.blocks));
  out.total = log_of_normal(average, inner, keys.usable);
  out.top = float(blocks.most) * 0x1p-6f + kBlockReach * inner;
  // The wider signs leave a head's logits, the more of its keys have to be candidates until its
  // best keys are among them.
  out.start = kHeadStart * inner;
  return out;
}

/**
 * The scale of a finite query.
 * @param blocks     logits of the zone's blocks; null: keys are not told from the means of these
 * @param quantised  (rotated_dim) -15 to 15
 * @param largest    of the rotated query's elements, without the 1 / sqrt of the rotation
 * @param window     see add_window
 */
inline HeadScale head_scale(const KeyMeans& keys, const BlockSums* blocks, const int8_t* quantised,
                            int64_t rotated_dim, float largest, float scale, float window) {
  const QuerySums query = keys.sums_with(quantised, rotated_dim);
  const float slope = slope_of(scale, largest / float(kQueryLevels), rotated_dim);
  HeadScale out = blocks == nullptr ? scale_of_zone(keys, query, slope)
                                    : scale_of_blocks(keys, *blocks, query.square, slope);
  out.add_window(window);
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

/** The head whose average key has the largest share of its attention. */
struct Lead {
  float anchor = -std::numeric_limits<float>::infinity();  // that share: mean less total
  float spread = kLeastSpread;
  float top = -std::numeric_limits<float>::infinity();  // of any head's keys, as such a share

  PKV_HOST_DEVICE void consider(const HeadScale& of) {
    if (!of.whole) return;
    top = std::max(top, of.top - of.total);
    const float share = of.mean - of.total;
    if (!(share > anchor)) return;
    anchor = share;
    spread = of.spread < kLeastSpread ? kLeastSpread : of.spread;
  }
};

/** A key's score for one head: slope * dot * norm + variance_term * norm^2 + offset. */
struct ScoreLine {
  float slope, variance_term, offset;
  float per_step;  // of a block's logit in steps, which is added
};

/**
 * Turns the scales of a group's heads to scores, rounded down: kScoreSteps of them to a spread of
 * the leading head, whose average key scores kScoreShift * kScoreSteps. A query that is not finite
 * scores every key the least, so that the others' scores stand.
 * Where the best block lies so far above the average that the joined scores of its keys would pass
 * 255, all scores are lowered: keys far below it may be alike, the best ones may not.
 */
struct ScoreLines {
  static constexpr float kMiddle = float(kScoreShift * kScoreSteps);
  float anchor;      // of the lead
  float per_octave;  // steps
  float octave;      // whole steps, with which the heads' scores are joined
  float middle;      // the score of the lead's average key

  PKV_HOST_DEVICE static ScoreLines of(const Lead& lead, int64_t searchers) {
    ScoreLines out{lead.anchor, float(kScoreSteps) / lead.spread, 0.0f, kMiddle};
    const float octave = kMostOctave < out.per_octave ? kMostOctave : out.per_octave;
    if (searchers > 1) out.octave = std::nearbyint(octave);
    const float most = 255.0f - kMiddle - out.octave * float(score_joins(searchers));
    const float excess = (lead.top - lead.anchor) * out.per_octave - most;
    if (excess > 0 && std::isfinite(excess)) out.middle = kMiddle - excess;
    return out;
  }

  PKV_HOST_DEVICE ScoreLine line(const HeadScale& of) const {
    if (!of.whole) return {};
    const ScoreLine out{of.slope * per_octave, of.variance_term * per_octave,
                        middle - (of.total + anchor) * per_octave, per_octave * 0x1p-6f};
    const bool known =
        std::isfinite(out.slope) && std::isfinite(out.variance_term) && std::isfinite(out.offset);
    return known ? out : ScoreLine{0, 0, kMiddle, 0};  // else nothing can be said of its keys
  }
};

/**
 * The scores of a group's heads.
 * @param scales              (searchers)
 * @param slope, variance_term, offset  (searchers) written
 * @param per_step            (searchers) written; null: no blocks
 * @return  the steps of an octave with which their scores are joined
 */
inline int32_t score_lines(const HeadScale* scales, int64_t searchers, float* slope,
                           float* variance_term, float* offset, float* per_step) {
  Lead lead;
  for (int64_t i = 0; i < searchers; ++i) lead.consider(scales[i]);
  const ScoreLines lines = ScoreLines::of(lead, searchers);
  for (int64_t i = 0; i < searchers; ++i) {
    const ScoreLine line = lines.line(scales[i]);
    slope[i] = line.slope;
    variance_term[i] = line.variance_term;
    offset[i] = line.offset;
    if (per_step != nullptr) per_step[i] = line.per_step;
  }
  return int32_t(lines.octave);
}

}  // namespace pariskv
