/**
 * The inner loops of the CPU verbs: one table of functions per instruction set.
 *
 * `plain` (in cpu/plain/) reads like the formula and is the oracle;
 * every other table must give the same bits. That is possible because the order of
 * every float sum is fixed here:
 *
 *   lanes    16 partial sums; element d goes to lane d % 16, in ascending d,
 *            each step one fused multiply-add
 *   fold     the lanes are added as i + (i+8), then i + (i+4), i + (i+2), i + (i+1)
 *   octet    the 8 terms of a subspace: products rounded, then the same fold over 8
 *
 * and because vector max is `a > b ? a : b` everywhere (so NaN in b survives); the largest
 * logit of a tile goes through lanes and fold as sums do, starting at minus infinity.
 */
#pragma once

#include <cstdint>

#include "pariskv/sizes.h"
#include "row_type.h"

namespace pariskv::cpu {

/** A run of keys of one kv head, from rows to summaries. */
struct EncodeRun {
  const void* const* keys;  // (count) each a half of head_dim numbers
  RowType type;
  int64_t count;
  int64_t head_dim;
  int64_t rotated_dim;          // the next power of two; subspaces = rotated_dim / 8
  const float* gain;            // (rotated_dim) key * gain + shift is encoded, a fused
  const float* shift;           // (rotated_dim) multiply-add; null: the key itself is
  const float* rotation_signs;  // (rotated_dim) +1 or -1
  const float* thresholds;      // (7) between magnitude levels
  const float* centres;         // (8) of magnitude levels
  uint8_t* signs;               // (count, subspaces)
  uint8_t* norm_codes;          // (count) 0: unusable, never selected
  uint16_t* scales;             // (count)
  uint8_t* records;             // (count, record_bytes): 3 bit planes of rotated_dim, weights
};

/** Coarse scores of a run of keys for the searching heads of their group. */
struct ScoreSignsRun {
  const uint8_t* signs;       // (count, subspaces)
  const uint8_t* norm_codes;  // (count)
  int64_t count;
  int64_t subspaces;
  int64_t heads;
  const int8_t* query;         // (heads, subspaces * 8), -15 to 15
  const float* slope;          // (heads)
  const float* variance_term;  // (heads)
  const float* offset;         // (heads)
  // Where keys are told from the means of blocks, a score's offset is offset + steps * per_step.
  int64_t block;         // keys of each, a multiple of 64: the run begins with one; 0: no blocks
  const int32_t* steps;  // (heads, ...) of the run's blocks, `step_stride` apart
  int64_t step_stride;
  const float* per_step;  // (heads)
  int32_t octave;         // see joined_score
  uint8_t* scores;        // (count): 0 unusable, else 1 to 255
};

/** Products of queries and of the means of blocks, both in whole levels. */
struct MeanDotsRun {
  const int8_t* means;  // (count, dim), -127 to 127
  int64_t count;
  int64_t dim;
  const int16_t* query;  // (heads, dim), -16383 to 16383
  int64_t heads;
  int32_t* dots;  // (heads, ...) `stride` apart
  int64_t stride;
};

struct ScoreVotesRun {
  const uint8_t* signs;       // (count, subspaces)
  const uint8_t* norm_codes;  // (count)
  int64_t count;
  int64_t subspaces;
  int64_t heads;
  const uint8_t* votes;  // (heads, subspaces, 256), 0 to 6
  uint8_t* scores;       // (count): 0 unusable, else 1 + the most votes of any head
};

/** Products of keys and queries, both rounded to 8 bits. */
struct RoundDotsRun {
  const void* const* keys;  // (count) each a half of head_dim numbers
  int64_t count;
  RowType type;
  int64_t head_dim;
  int64_t queries;
  const int16_t* query;  // (queries, head_dim), -127 to 127
  int32_t* dots;         // (queries, count); 0 where a key is not finite
  uint8_t* exponents;    // (count) of a key's largest element, see kLeastExponent; 255: not finite
};

/** Logits in whole steps (octaves.h) from products of 8-bit keys and one query. */
struct StepLogitsRun {
  const int32_t* dots;  // (count)
  const float* steps;   // (count) of the keys, see key_step
  int64_t count;
  float unit;       // of the query
  int32_t offset;   // steps that are added
  int32_t most;     // steps at most, either way
  int32_t* logits;  // (count) become these if they are less
};

/** A weight times a reciprocal is a share so many bits further up: see observe.h. */
constexpr int kShareShift = 29;

/** Estimated logits (less the query's own factors) of some keys of one segment. */
struct EstimateRun {
  const uint8_t* signs;    // (keys, subspaces)
  const uint16_t* scales;  // (keys)
  const uint8_t* records;  // (keys, record_bytes)
  int64_t rotated_dim;
  const int32_t* slots;  // (count) which keys
  int64_t count;
  int64_t heads;
  const float* query;    // (heads, rotated_dim)
  const float* centres;  // (16) index = level + 8 * sign bit; bit 0 is negative
  float* estimates;      // (heads, ...) `head_stride` apart
  int64_t head_stride;
};

/** How much some pages may be worth to a group: their digests against its queries. */
struct ScorePagesRun {
  const uint16_t* digests;  // (count, 2, dim) float16: c, then r
  const float* units;       // (count) of a page's numbers
  int64_t count;
  int64_t dim;
  int64_t queries;
  const float* query;  // (queries, dim)
  float* scores;       // (count) sums over the queries of q.c + |q|.r, see kMostPageScore
};

/**
 * A page's score for a query is one sum over the lanes: in each step q c, then |q| r. Times the
 * unit it is kept within this, NaN below, so that sums over queries are numbers. They are taken in
 * the order of the queries.
 */
constexpr float kMostPageScore = 0x1p100f;

/** Attention of some queries over some rows, continued from and left in a running state. */
struct AttendRun {
  const void* const* keys;    // (count) each a half of key_dim numbers
  const void* const* values;  // (count) of value_dim numbers
  int64_t count;
  RowType key_type;
  RowType value_type;
  int64_t key_dim;
  int64_t value_dim;
  int64_t queries;
  const float* query;     // (queries, key_dim)
  const int64_t* limits;  // (queries) query i sees rows 0 to limits[i]; others are not read
  float scale;
  float softcap;             // 0: none
  const float* shift;        // (queries) added to each scaled product of a query; null: nothing is
  float* maximum;            // (queries) in, out; starts at -infinity
  float* sum;                // (queries) in, out; starts at 0
  float* weighted;           // (queries, value_dim) in, out; starts at 0
  float* scratch;            // (kAttendTile, the larger of both)
  float* squares = nullptr;  // (queries) as sum, of squared exponentials; null: not wanted
};

/** An estimate fetches the summaries of this many keys ahead; measured, more get dropped. */
constexpr int64_t kEstimateAhead = 8;

/** Rows are taken in tiles of this many, counted from the first row of the run. */
constexpr int64_t kAttendTile = 64;

/** Keys that a tally takes at most: their sums stay within 32 bits. */
constexpr int64_t kTallyKeys = 1024;

struct Kernels {
  const char* name;

  void (*encode)(const EncodeRun&);

  /**
   * positive[d] += units[i] for every key i whose sign bit d is set.
   * signs (count, subspaces), units (count) up to 2^20, positive (subspaces * 8)
   */
  void (*tally)(const uint8_t* signs, const int32_t* units, int64_t count, int64_t subspaces,
                int32_t* positive);

  void (*score_signs)(const ScoreSignsRun&);
  void (*score_votes)(const ScoreVotesRun&);
  void (*mean_dots)(const MeanDotsRun&);

  /**
   * Appends the indices (from `base`) of scores above `threshold`, and of the first
   * `ties` equal to it, in order; returns how many were written. `ties` is lowered
   * by the ones taken. May write up to 64 entries past the last one.
   */
  int64_t (*collect)(const uint8_t* scores, int64_t count, uint8_t threshold, int64_t* ties,
                     int32_t base, int32_t* out);

  void (*round_dots)(const RoundDotsRun&);

  // Attention in whole numbers, observe.h.
  void (*step_logits)(const StepLogitsRun&);
  /** Logits become weights, `most` being the largest; returns their sum. table: kWeights. */
  uint64_t (*weigh)(int32_t* logits, int64_t count, int32_t most, const uint32_t* table);
  /** Adds share_of each weight. */
  void (*add_shares)(const int32_t* weights, int64_t count, uint64_t reciprocal, uint64_t* shares);

  void (*estimate)(const EstimateRun&);
  void (*score_pages)(const ScorePagesRun&);
  void (*attend)(const AttendRun&);

  /** The sum of exp(x[i] - shift) over lanes and fold. */
  float (*sum_exp)(const float* x, int64_t count, float shift);

  /** sums[i] += exp(x[i] - shift). */
  void (*add_exp)(const float* x, int64_t count, float shift, float* sums);

  /** A half of a row as floats; any first numbers of one, where the type has no scale. */
  void (*to_float)(const void* half, RowType type, int64_t count, float* out);

  /** A half as one in 8 bits: levels, then their scale, as int8_scale and float_to_int8 say. */
  void (*to_int8)(const void* half, RowType type, int64_t count, char* out);

  /** out[i] = affine(x[i], factor[i], added[i]); returns the bits of the largest magnitude. */
  uint32_t (*affine)(const float* x, const float* factor, const float* added, int64_t count,
                     float* out);
};

/**
 * What a kernel calls for a size or a type that it was not compiled for: throws InternalError.
 * Out of line, in code for the oldest machine, as exceptions have inline functions.
 */
[[noreturn]] void no_kernel(const char* what, int64_t value);

/** The oracle, always there. */
const Kernels& plain_kernels();

/** Null when this build or machine lacks the instructions. */
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

/**
 * The best table for this machine, chosen once. The environment variable
 * PARISKV_CPU_LEVEL (plain, avx2, avx512), read at that moment, lowers the choice.
 */
const Kernels& best_kernels();

}  // namespace pariskv::cpu
