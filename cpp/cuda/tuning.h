/**
 * Numbers that were measured on a GPU: they make calls faster or slower, and no sum has another
 * order because of them. Only `crossings` change results, for caches that ask for
 * dense_below="batch". docs/add-a-gpu.md says how each number is measured.
 *
 * Not here are numbers that are part of a result (shares of exact attention, pieces of
 * attend_dense, device/partition.cuh, the default of Config::dense_below), and numbers that are
 * compiled into a kernel or follow from its registers and shared memory.
 */
#pragma once

#include "step_mode.h"

namespace pariskv::cuda {

/** A row of the table. `_per_sm`: thread blocks of a launch for each multiprocessor, at most. */
struct Tuning {
  /**
   * Where a search takes as long as attention in full, with all rows in the GPU's memory, of four
   * query heads of 128 dimensions for a kv head; see Crossings::of_heads. No sequence below
   * ParisKV::kSearchedFromByBatch is searched, whatever stands here.
   */
  Crossings crossings;

  // A step of ParisKV.
  int scores_per_sm;   ///< score. A third block would take the room of attend_resident.
  int means_per_sm;    ///< window_logits: blocks for means.
  int reranks_per_sm;  ///< rerank.
  int warmup_blocks;   ///< rerank: blocks in all that fetch its code while keys are scored.
  /**
   * Shared memory of a block of attend, and of PRKV's attend_pages. Two blocks fit a
   * multiprocessor, or one beside rerank.
   */
  int attend_bytes;
  int blocks_in_turns;  ///< The largest cluster that may wait for room, with rows over the bus.
  int branch_heads;     ///< kv heads of a branch of a recorded step, at least.
  int decode_branches;  ///< Branches of a recorded step, at most.
  int branch_jobs;      ///< Jobs (a layer of a sequence) of a branch of a flush, at least.
  int encode_branches;  ///< Branches of a flush, at most.

  // Steps of HARD-KV and PRKV, and PRKV's choices.
  int kept_per_sm;         ///< attend_kept.
  int pages_per_sm;        ///< score_pages.
  int listed_copy_blocks;  ///< copy_listed: blocks in all; enough to keep the bus busy.

  // Prompts.
  int rows_per_sm;  ///< append and read.
};

/** The row of a compute capability: its own, or the one of the nearest lower capability. */
const Tuning& tuning_for(int major, int minor);
/** The row of a device: see cuda_backend.cpp. */
const Tuning& tuning_of(int device);

}  // namespace pariskv::cuda
