/** ParisKV's work on keys that enter or leave a zone. */
#pragma once

#include "ops.h"
#include "policy/pariskv/rules.h"

namespace pariskv {

/** Statistics of a zone's keys, kept as they come and go. Whole numbers: order cannot matter. */
struct KeyStatistics {
  int64_t* usable;        // (heads) keys that can be selected
  int64_t* square_units;  // (heads) sum of norm^2, in units of kNormUnit^2
  int64_t* sums;          // (heads, rotated_dim) sum of norm * sign, in units of kNormUnit;
                          // null where keys are told from the means of their blocks
  int32_t* counts;        // (heads, subspaces, 256) keys per centroid; null: not kept
};

/**
 * How the channels of a head are balanced between queries and keys, and what all its keys have in
 * common: <q, k> = <S q, c> + <S q, k / S - c>. Set when a zone opens, from its first keys and from
 * queries that a prompt brought, and then kept. Null: keys are encoded whole.
 */
struct Balance {
  float* query_squares;  // (windows, heads, key_dim) sums over the queries that were observed
  float* stretch;        // (heads, key_dim) S, of queries
  float* gain;           // (heads, key_dim) 1 / S, of keys
  float* centre_step;    // (heads) of
  int16_t* centre;       // (heads, key_dim) c, in steps
};

/** Positions [begin, end) of one sequence. */
struct EncodeJob {
  SequenceView sequence;
  KeyStatistics statistics;
  Balance balance;
  int64_t begin, end;
  int64_t opening;  // > 0: these are a zone's first keys, and up to here they set its balance,
  int64_t query_windows;  // together with the queries of so many windows
};

struct EncodeArgs {
  ModelShape shape;
  const Codec* codec;
  int64_t batch;
  const EncodeJob* jobs;  // (batch)
};

/** Queries that a prompt brings for the balance: their squares added to those of their window. */
struct ObserveJob {
  float* squares;  // (heads, key_dim) of the window
  bool first;      // nothing was added before
  TensorView q;    // (positions, query_heads, key_dim)
};

struct ObserveArgs {
  ModelShape shape;
  int64_t batch;
  const ObserveJob* jobs;  // (batch)
};

}  // namespace pariskv
