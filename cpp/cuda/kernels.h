/**
 * The launchers: one per verb. Device code and launcher of a verb lie in the file of its name;
 * ParisKV's, in pariskv; of kept rows, in kept; PRKV's, in prkv; of exact attention, in exact. A
 * launcher enqueues on `stream`, never waits, and throws CudaError when the launch is refused.
 */
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "arguments.h"
#include "kept/calls.h"
#include "kept/decode/call.h"
#include "page_fill.h"
#include "pariskv/decode/call.h"
#include "pariskv/sizes.h"
#include "policy/pariskv/jobs.h"
#include "prkv/calls.h"
#include "tables.h"

namespace pariskv::cuda {

/** Whether this build has code that runs on such a device; and for which it has, in words. */
bool has_code_for(int major, int minor);
std::string code_text();

/** One word of 8 bytes to be written on the device. */
struct WordUpdate {
  uint64_t* target;
  uint64_t value;
};

/** Writes `count` words, in stream order; the words travel with the launches. */
void launch_word_updates(const WordUpdate* updates, int64_t count, cudaStream_t stream);

/** One token more in each layer's view of `count` sequences; their addresses travel along. */
void launch_add_token(SequenceView* const* views, int64_t count, int64_t layers,
                      cudaStream_t stream);

/** Copies multiples of 16 bytes between blocks of any memory that the device can reach. */
constexpr int kCopyBlocks = 4;  // compiled in; two keep the bus busy, the rest of the GPU is free
void launch_copies(const RowCopy* copies, int64_t count, cudaStream_t stream);

/** Memory that is to be zeros: a multiple of 16 bytes. */
struct Cleared {
  void* data;
  int64_t bytes;
};
constexpr int64_t kMostCleared = 2000;  // of a launch; their addresses travel along
/** Zeroes at most kMostCleared blocks of any memory that the device can reach. */
void launch_clear(const Cleared* blocks, int64_t count, cudaStream_t stream);

/** Some of the packed tokens of a call: those of one sequence. */
struct RowsItem {
  const SequenceView* sequence;  // in device memory
  int64_t begin;                 // first position
  int64_t tokens;
  int32_t page_row;  // of a page table, or ~row where pages do not serve the sequence
};

/** Tokens of sequences between packed tensors and the store. */
struct RowsCall {
  ModelShape shape;
  const RowsItem* items;  // in the host's memory; their tokens follow one another
  int64_t count;
  Rows k, v;      // (tokens, heads, key_dim or value_dim)
  PageFill fill;  // of an append
};
void launch_append(const RowsCall& call, cudaStream_t stream);
void launch_read(const RowsCall& call, cudaStream_t stream);

/** Rows of a page table, and their lengths; they travel along. */
void launch_set_lengths(int32_t* lengths, const int32_t* rows, const int32_t* values, int64_t count,
                        cudaStream_t stream);

/** Rows of one sequence to narrow ones, of positions that enter its zone. */
struct NarrowCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory
  void* state;                   // of the search, which knows what rows have in common
  int64_t begin, end;
};
void launch_narrow(const NarrowCall& call, cudaStream_t stream);

/** Narrow rows of one segment to tensors, or to plain rows of a segment. */
struct WidenCall {
  ModelShape shape;
  const char* segment;
  uint8_t* summaries;  // of the segment
  void* state;
  int64_t slot, tokens;  // of the first one, and how many
  Rows k, v;             // (tokens, heads, key_dim or value_dim)
};
void launch_widen(const WidenCall& call, cudaStream_t stream);

/** Rows of a tail from number `from` on, to the sequence's block of their copies. */
struct TailCopyCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory
  void* state;                   // of the search
  Tail tail;
  int64_t from;       // 0: their common part is set first
  int64_t tail_rows;  // of the policy
};
void launch_copy_tail(const TailCopyCall& call, cudaStream_t stream);

/** Positions [begin, end) of one sequence that enter its zone, or leave it. */
struct EncodeCall {
  ModelShape shape;
  CodecConstants codec;
  const SequenceView* sequence;  // in device memory
  KeyStatistics statistics;      // pointers into device memory; counts may be null
  Balance balance;               // the same; all null without blocks
  int64_t begin, end;
  int64_t opening;  // as in EncodeJob
  int64_t query_windows;
};
/** The balance of a zone that opens, from its first keys. */
void launch_balance(const EncodeCall& call, cudaStream_t stream);
/** What V of narrow rows has in common, at the same time; from then on such rows have a base. */
void launch_narrow_base(const EncodeCall& call, void* state, cudaStream_t stream);
/** The means of the blocks that keys enter. */
void launch_means(const EncodeCall& call, cudaStream_t stream);
/** Rows to summaries; where there are blocks, of what their means leave. */
void launch_encode(const EncodeCall& call, cudaStream_t stream);
/** Adds (direction 1) or takes off (-1) the statistics of the keys, from their summaries. */
void launch_tally(const EncodeCall& call, int64_t direction, cudaStream_t stream);

/** Queries that a prompt brings for the balance. */
struct ObserveCall {
  ModelShape shape;
  float* squares;  // (heads, key_dim) of a window, added to
  bool first;      // nothing was added before
  Rows q;          // (positions, query_heads, key_dim)
  int64_t positions;
};
void launch_observe(const ObserveCall& call, cudaStream_t stream);

/** Exact causal attention of the last `tokens` tokens of one sequence over rows [begin, end). */
struct AttendExactCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory; its `total` counts
  int64_t total;                 // the same, as the host knows it
  int64_t tokens;                // queries per query head
  int64_t call_tokens;           // of the whole call, of which this may be a part
  Rows q;                        // (tokens, query_heads, key_dim)
  Rows out;
  float* lse;  // (tokens, query_heads); null: not wanted
  int64_t lse_stride;
  Logits logits;
  Precision precision;
  int64_t begin, end;  // of rows: of whole segments, but for the last of all
  const char* staged;  // null, or where segments from `staged_segment` on lie in a row
  int64_t staged_segment;
  // With states, several launches make one result: each but the first resumes, and
  // launch_finish_exact writes it. Each has `shares` blocks for the same queries.
  float* states;  // (shares, kv_heads, tokens * group, exact_state_floats); null: one launch
  int64_t shares;
  bool resumes;
};
void launch_attend_exact(const AttendExactCall& call, cudaStream_t stream);
void launch_finish_exact(const AttendExactCall& call, cudaStream_t stream);
/** Floats of a query's state. */
int64_t exact_state_floats(const ModelShape& shape);
/** Queries of a kv head that a thread block has. */
int64_t exact_block_queries(const AttendExactCall& call);

/** Exact logits of chosen rows of the zone, for explanations. */
struct ExactLogitsCall {
  ModelShape shape;
  const SequenceView* sequence;  // in device memory
  void* state;                   // of the search
  Rows q;                        // (1, query_heads, key_dim)
  Logits logits;
  const int32_t* positions;  // (heads, width); -1: none, left alone
  int64_t width;
  float* out;  // (query_heads, width)
};
void launch_exact_logits(const ExactLogitsCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
