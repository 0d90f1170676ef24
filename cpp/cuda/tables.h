/**
 * What kernels read from device memory instead of from their arguments, so that a captured graph
 * stays valid while sequences grow: the host writes these tables, in stream order, and a
 * launch names only where they are.
 *
 * A sequence is an array of SequenceView, one per layer, whose pointers lead to memory of the
 * device or the host. A lane is one row of a batch: which sequence it decodes, and its scratch.
 */
#pragma once

#include <cstdint>

#include "ops.h"

namespace pariskv::cuda {

/** Sums over resident and over selected rows are made in as many shards, whatever the grid. */
constexpr int kShards = 16;

/** Scratch of one lane: offsets in bytes from its base, fixed by the capacities. */
struct ScratchLayout {
  int64_t scores;           // (heads, score_stride) uint8: the key at `offset` of the zone has its
                            // score at offset + zone_begin % kScoreAlignment
  int64_t counts;           // (heads, blocks that scan a head) ScanCounts
  int64_t scanned;          // (heads, blocks that scan a head) uint32: the step's token, once done
  int64_t masses;           // (heads, slices, group, 2) float: maximum, sum of estimates
  int64_t windows;          // (heads, group, rows of a window) int32: logits in steps
  int64_t votes;            // (heads, searchers, subspaces, 256) uint8
  int64_t candidates;       // (heads, candidate_capacity) int32: offsets from zone_begin, ascending
  int64_t estimates;        // (heads, searchers, candidate_capacity) float
  int64_t worth;            // (heads, candidate_capacity) float
  int64_t selected;         // (heads, selected_stride) int32: indices into candidates, ascending
  int64_t addresses;        // (heads, selected_stride) uint64: where the selected rows lie
  int64_t fresh;            // (heads, selected_stride) int32: positions of selected rows that the
                            // row cache lacks, then the slots they go to; negative: none
  int64_t selected_count;   // (heads) int32
  int64_t candidate_count;  // (heads) int32
  int64_t resident;         // (heads, kShards, group, 2 + head_dim) float: maximum, sum, weighted
  int64_t fetched;          // the same for the selected rows
  int64_t selected_stride;  // not an offset: rows that are selected at most
  int64_t score_stride;     // not an offset
  int64_t bytes;
};

/** Scores start at a multiple of this many positions, so that they can be moved in words. */
constexpr int64_t kScoreAlignment = 128;

/** Multiples of 8 bytes, as everything that the host writes word by word. */
struct Lane {
  const SequenceView* layers;  // (layers); null: nobody's row, left alone
  char* scratch;
  int64_t zone_capacity;
  int64_t candidate_capacity;
};

}  // namespace pariskv::cuda
