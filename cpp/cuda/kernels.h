/**
 * The launchers: one per verb. Device code and launcher of a verb lie in the file of its name.
 * A launcher enqueues on `stream`, never waits, and throws CudaError when the launch is refused.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "pariskv/sizes.h"
#include "policy/pariskv/upkeep.h"
#include "tables.h"

namespace pariskv::cuda {

/** Whether this build has code that runs on such a device; and for which it has, in words. */
bool has_code_for(int major, int minor);
std::string code_text();

/** Constants of the codec, small enough to travel with every launch. */
struct CodecConstants {
  uint32_t negative[kMaxRotatedDim / 32];  // bit d % 32 of word d / 32: rotation sign d is -1
  float thresholds[7];
  float centres[8];
};

/** A rank-3 tensor (i, j, d): innermost elements side by side. */
struct Rows {
  char* data;                  // null: not there
  int64_t stride_i, stride_j;  // in elements
};

/** One word of 8 bytes to be written on the device. */
struct WordUpdate {
  uint64_t* target;
  uint64_t value;
};

/** Writes `count` words, in stream order; the words travel with the launches. */
void launch_word_updates(const WordUpdate* updates, int64_t count, cudaStream_t stream);

/** Copies a multiple of 16 bytes between blocks of any memory that the device can reach. */
void launch_copy(void* target, const void* source, int64_t bytes, cudaStream_t stream);

/** Tokens of one sequence between packed tensors and the store. */
struct RowsCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory
  int64_t begin;                 // first position
  int64_t tokens;
  Rows k, v;  // (tokens, heads, key_dim or value_dim)
};
void launch_append(const RowsCall& call, cudaStream_t stream);
void launch_read(const RowsCall& call, cudaStream_t stream);

/** Positions [begin, end) of one sequence that enter its zone, or leave it. */
struct EncodeCall {
  ModelShape shape;
  CodecConstants codec;
  const SequenceView* sequence;  // in device memory
  KeyStatistics statistics;      // pointers into device memory; counts may be null
  int64_t begin, end;
};
/** Rows to summaries. */
void launch_encode(const EncodeCall& call, cudaStream_t stream);
/** Adds (direction 1) or takes off (-1) the statistics of the keys, from their summaries. */
void launch_tally(const EncodeCall& call, int64_t direction, cudaStream_t stream);

/**
 * The kernels of a decode, in order. A launch may run some of them alone: the bench does. A graph
 * of a scan that is not followed by all the others cannot be replayed: the last one takes away what
 * tells that keys are scored.
 */
enum DecodeStep : int { kScan, kEstimate, kTake };

struct DecodeCall {
  ModelShape shape;
  CodecConstants codec;
  Scorer scorer;
  GroupRule group_rule;
  int64_t top_k;
  int64_t searchers;  // group, or 1 for mean_query
  int64_t batch;
  int64_t first_head, heads;  // of the batch's, row by row: those of this launch; others may be at
                              // work as well
  int64_t layer;
  const Lane* lanes;  // (batch), in device memory
  Rows q;             // (batch, query_heads, key_dim)
  Rows k, v;          // (batch, heads, key_dim or value_dim): the new token, at total - 1; data
                      // null: none, all rows are in the store
  Rows out;           // (batch, query_heads, value_dim); data null: not wanted
  float* lse;         // (batch, query_heads) `lse_stride` apart; null: not wanted
  int64_t lse_stride;
  Logits logits;              // sink_bias in device memory
  int64_t* counters;          // DecodeCounts, added to
  bool explains;              // what candidates are worth is left in scratch
  int first_step, last_step;  // DecodeStep, both included
};
void launch_decode(const DecodeCall& call, cudaStream_t stream);

/** Where the scratch of a kv head keeps what: the device is told in Lane. */
ScratchLayout scratch_layout(const ModelShape& shape, int64_t searchers, int64_t top_k, bool votes,
                             int64_t zone_capacity, int64_t candidate_capacity);

/** Exact causal attention of the last `tokens` tokens of one sequence over all of it. */
struct AttendExactCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory; its `total` counts
  int64_t total;                 // the same, as the host knows it
  int64_t tokens;                // queries per query head
  Rows q;                        // (tokens, query_heads, key_dim)
  Rows out;
  float* lse;  // (tokens, query_heads); null: not wanted
  int64_t lse_stride;
  Logits logits;
};
void launch_attend_exact(const AttendExactCall& call, cudaStream_t stream);

/** Exact logits of chosen rows, for explanations. */
struct ExactLogitsCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory
  Rows q;                        // (1, query_heads, key_dim)
  Logits logits;
  const int32_t* positions;  // (heads, width); -1: none, left alone
  int64_t width;
  float* out;  // (query_heads, width)
};
void launch_exact_logits(const ExactLogitsCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
