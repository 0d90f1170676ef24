/** A decode, as the host asks for it. */
#pragma once

#include <cuda_runtime_api.h>

#include "page_fill.h"
#include "pariskv/decode/scratch.h"
#include "pariskv/policies.h"

namespace pariskv::cuda {

/**
 * The steps of a decode, in order. A launch may run some of them alone: the bench does. A graph of
 * scores without the other steps cannot be replayed: the last step clears the flags of all.
 */
enum DecodeStep : int { kScore, kRerank, kAttend };

/**
 * Bytes that the context of a head needs (context.cuh). From the host: the thread that fills a
 * context in is waited for by its block, in each kernel of a step.
 */
struct ContextBytes {
  int row, zone_row, tail_row;
  int tail_common;     // of a head: what copies of the tail's rows have in common
  int64_t tail_first;  // of a block of such copies before the first row
  int64_t tail_head;   // from a head's rows to the next one's

  static ContextBytes of(const ModelShape& shape, int64_t tail_rows) {
    const TailCopies copies = shape.tail_copies(Tail::capacity(tail_rows));
    return {int(shape.rows.bytes()), int(shape.zone_rows().bytes()),
            int(copies.row_bytes),   int(copies.common_bytes()),
            copies.row_offset(0, 0), copies.row_offset(1, 0) - copies.row_offset(0, 0)};
  }
};

struct DecodeCall : StepCall {
  const ParisKVSlot* slots;  // (batch), in device memory
  CodecConstants codec;
  Scorer scorer;
  GroupRule group_rule;
  int64_t top_k;
  int64_t searchers;  // group, or 1 for mean_query
  int64_t tail_rows;  // see tail.h; 0: rows that are not selected are left out
  ContextBytes bytes;
  double error_left;  // that a budget allows, see policy/pariskv/budget.h; 0: there is none
  bool weighs;        // the error that is left is wanted: by a budget or by somebody
  bool looks_beyond;  // what is known of other keys, too: by a budget or by `explain`
  float* error;       // (batch, kv_heads) `error_stride` apart; null: not wanted
  int64_t error_stride;
  int64_t first_head, heads;  // of the batch's, row by row: heads of this launch
  /**
   * (batch), in device memory: the rows of the batch whose heads these are, -1 where there are no
   * more; launch_dense writes it. Null: all rows.
   */
  int32_t* searched_rows;
  int64_t* counters;          // DecodeCounts, added to
  bool over_bus;              // rows that are selected may be in host memory
  bool explains;              // the worth of candidates is left in scratch
  bool dense_apart;           // what is attended to in full is launch_dense's
  int first_step, last_step;  // DecodeStep, both included
};
void launch_decode(const DecodeCall& call, cudaStream_t stream);

/** Whether launch_dense knows rows of this kind, and the device has the shared memory for it. */
bool has_dense(const DecodeCall& call);
/** Sequences of a batch that launch_dense knows the searched ones of. */
constexpr int64_t kMostDense = 256;

/** What launch_dense chooses by how many sequences are searched; see Conditional. */
struct DenseChoice {
  static constexpr int kMost = 5;
  uint64_t condition;  // of a graph; 0: there is nothing to choose
  int count;           // of bodies: the last one that has room for all is chosen
  int room[kMost];     // sequences, most first
};
/**
 * Attention of all heads of the batch's sequences that are attended to in full; of the others it
 * only writes which they are.
 */
void launch_dense(const DecodeCall& call, const DenseChoice& choice, cudaStream_t stream);

/** Sequences of a batch that launch_paged_step knows the others of. */
constexpr int64_t kMostNamed = 4096;
/**
 * Beside kernels that read pages: of sequences whose length in the table is not 0, the token's row
 * goes to its place, and their pages to their rows of the table. The others are named in
 * `searched_rows`, and `choice` is made for them.
 * @param page_rows  (batch) of the table, in device memory; null: row s is slot s's
 */
void launch_paged_step(const DecodeCall& call, const PageFill& fill, const int32_t* page_rows,
                       const DenseChoice& choice, cudaStream_t stream);

}  // namespace pariskv::cuda
