/** A decode, as the host asks for it. */
#pragma once

#include <cuda_runtime_api.h>

#include "pariskv/decode/scratch.h"
#include "pariskv/policies.h"

namespace pariskv::cuda {

/**
 * The steps of a decode, in order. A launch may run some of them alone: the bench does. A graph of
 * scores without the other steps cannot be replayed: the last step clears the flags of all.
 */
enum DecodeStep : int { kScore, kRerank, kAttend };

struct DecodeCall : StepCall {
  const ParisKVSlot* slots;  // (batch), in device memory
  CodecConstants codec;
  Scorer scorer;
  GroupRule group_rule;
  int64_t top_k;
  int64_t searchers;  // group, or 1 for mean_query
  int64_t tail_rows;  // see tail.h; 0: rows that are not selected are left out
  uint32_t tail_seed;
  double error_left;  // that a budget allows, see policy/pariskv/budget.h; 0: there is none
  bool weighs;        // the error that is left is wanted: by a budget or by somebody
  float* error;       // (batch, kv_heads) `error_stride` apart; null: not wanted
  int64_t error_stride;
  int64_t first_head, heads;  // of the batch's, row by row: heads of this launch
  int64_t* counters;          // DecodeCounts, added to
  bool over_bus;              // rows that are selected may be in host memory
  bool explains;              // the worth of candidates is left in scratch
  int64_t in_full_below;      // tokens: see ParisKVPlan::candidates_of
  bool dense_apart;           // what is attended to in full is launch_dense's
  int first_step, last_step;  // DecodeStep, both included
};
void launch_decode(const DecodeCall& call, cudaStream_t stream);

/** Whether launch_dense knows rows of this kind, and the device has the shared memory for it. */
bool has_dense(const DecodeCall& call);
/**
 * Attention of all heads of the batch's sequences that are attended to in full; no others.
 * @param condition  set where there are others; 0: nobody asks
 */
void launch_dense(const DecodeCall& call, uint64_t condition, cudaStream_t stream);

}  // namespace pariskv::cuda
