/**
 * Recent queries and kept rows, as the host asks for them, whatever the policy. Launchers are in
 * remember/remember.cu and keep/launch.cu.
 */
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"
#include "ops.h"

namespace pariskv::cuda {

/** Queries of some positions of one sequence, to where they are remembered. */
struct RememberCall {
  ModelShape shape;
  Logits logits;
  char* recent;   // in device memory, see recent.h
  int64_t begin;  // the first position
  int64_t positions;
  Rows q;  // (positions, query_heads, key_dim)
};
void launch_remember(const RememberCall& call, cudaStream_t stream);

/** How rows are chosen by the attention of queries. */
struct ChoiceRules {
  int64_t most, least;  // rows that a choice keeps per kv head
  uint32_t p;           // of the attention, see observe.h; 2^kTopPBits: of any number, `most`
  int64_t pool;         // neighbours whose largest logit ranks a row; 1: its own does
  int64_t patience;     // choices that a row may lose before it is forgotten
};

/** A zone that grew, of which rows are to be kept. Blocks are in device memory, see kept.h. */
struct ChoiceJob {
  const SequenceView* sequence;  // as it will be: where rows lie
  char* before;                  // rows to choose from; null: no row was kept
  char* after;                   // to be filled
  const char* recent;
  int64_t before_capacity, after_capacity;
  int64_t added, zone_end;  // rows to choose from besides: positions [added, zone_end)
  Positions asked;          // whose queries choose
  const int64_t* rows;      // to be kept at most, in device memory; null: as the rules say
};
/** Choices that are made side by side: so many fit into the arguments of a launch. */
constexpr int64_t kMostChoices = 16;

/**
 * Where the arrays of a choice lie in its scratch: bytes from the start of a kv head's. A policy
 * has the arrays that it needs.
 */
struct ChoiceScratch {
  int64_t width;        // rows to choose from, at most
  int64_t head;         // ChosenHead
  int64_t reference;    // (key_dim) float
  int64_t query_heads;  // (recent, group) QueryHead
  int64_t packed;       // (recent, group, key_dim) int8 queries, as products take them
  int64_t listed;       // (width) int32: positions to choose from; 0: those kept, then new ones
  int64_t sources;      // (rows that were kept) int32: where they lie in the block before;
                        // if listed, (width): negative: not there
  int64_t logits;       // (recent, width) int32, then weights
  int64_t reciprocals;  // (recent, 2) uint64: of the weights' sum, and of the pooled ones'
  int64_t usable;       // (width) uint8
  int64_t shares;       // (width) uint64
  int64_t ranks;        // (width) uint64
  int64_t picked;       // (rows to be kept) int32: their numbers among the rows to choose from
  int64_t agreed;       // (group) int32: rows that are among the best of two queries
  int64_t whole;        // (rows to be kept) int32, of pages that they leave: number of a page's
                        // first row, if all of them are listed; else -1
  int64_t bytes;
};
ChoiceScratch choice_scratch(const ModelShape& shape, int64_t width, int64_t before_capacity,
                             int64_t after_capacity);

/** Choices of some kv heads, [first_head, first_head + heads) of each of some jobs. */
struct ChoiceCall {
  ModelShape shape;
  ChoiceRules rules;
  ChoiceScratch scratch;
  char* space;  // (count, heads, scratch.bytes)
  int64_t first_head, heads;
  int64_t count;
  ChoiceJob jobs[kMostChoices];
};
void launch_choice(const ChoiceCall& call, cudaStream_t stream);

/** A zone that was cut: the rest of its kept rows. */
struct TrimCall {
  ModelShape shape;
  char *before, *after;  // blocks
  int64_t before_capacity, after_capacity;
  int64_t zone_end;
};
void launch_trim(const TrimCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
