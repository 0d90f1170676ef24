/**
 * PRKV's work on zones that change, as the host asks for it. Launchers are in digest/launch.cu and
 * keep/launch.cu. The calls of a step are in decode/call.h.
 */
#pragma once

#include <cuda_runtime_api.h>

#include "kept/calls.h"
#include "policy/prkv/rules.h"
#include "tables.h"

namespace pariskv::cuda {

/** Positions [begin, end) of a sequence, whole pages but for the sink's part of the first. */
struct DigestSpan {
  const SequenceView* sequence;  // in device memory
  int64_t begin, end;
};
/** Spans that are digested side by side: so many fit into the arguments of a launch. */
constexpr int64_t kMostSpans = 32;

/** Pages that enter zones: rows to digests, which are written to the sequences' summaries. */
struct DigestCall {
  ModelShape shape;
  PRKVRules rules;
  int64_t count;
  DigestSpan spans[kMostSpans];
};
void launch_digest(const DigestCall& call, cudaStream_t stream);

/** The arrays of a kv head while its rows are looked at: bytes from the start of it. */
struct LookScratch {
  int64_t keys;     // (width, key_dim in whole instructions) int8, less the reference; or those of
                    // (2, pages): middles, then distances
  int64_t steps;    // float, of each of them; 0: it is not finite
  int64_t copies;   // (width, key_dim) keys as they are, of rows that are listed
  int64_t tallies;  // (recent, group) Tally
  int64_t ends;     // (group, 2) int32: the first and the last query of each query head
  int64_t logits;   // (group, 2, width) int32, of these, where a budget is split by them
  int64_t bytes;
};

/**
 * Choices of all kv heads of some jobs, each from all of a zone or all from the best pages, and the
 * pages that they amend. Rows are looked at some heads at a time.
 */
struct PRKVChoiceCall {
  ChoiceCall choice;  // `agreed` of its scratch is there, but none of `logits` and `shares`
  PRKVRules rules;
  cudaEvent_t bus;                        // keys have come over it; null: no need, rows are near
  bool compares;                          // budgets are split by how far queries agree
  const PRKVSplit* before[kMostChoices];  // else those of blocks before: null where a share is set
  int64_t wanted[kMostChoices];           // the best pages that are looked at; 0: all rows are
  int64_t pages;                          // of a zone, at most; 0: all rows are looked at
  LookScratch look;
  char* look_space;       // (count, heads_at_once, look.bytes)
  int64_t heads_at_once;  // all, or there is one job
};
/** @param listed  rows are those of the best pages */
ChoiceScratch prkv_choice_scratch(const ModelShape& shape, int64_t width, int64_t after_capacity,
                                  bool listed);
LookScratch look_scratch(const ModelShape& shape, int64_t width, bool compares, bool listed);
void launch_prkv_choice(const PRKVChoiceCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
