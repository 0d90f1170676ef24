/**
 * What kernels read from device memory instead of from their arguments, so that a captured graph
 * stays valid while sequences grow: the host writes these tables, in stream order, and a
 * launch names only where they are.
 *
 * A sequence is an array of SequenceView, one per layer, whose pointers lead to memory of the
 * device or the host. A lane is one row of a batch: which sequence it decodes, and its scratch.
 */
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops.h"

namespace pariskv::cuda {

/** Sums over resident and over selected rows are made in as many shards, whatever the grid. */
constexpr int kShards = 16;

/** Scratch of one kv head of a lane: offsets in bytes from its base, fixed by the capacities. */
struct ScratchLayout {
  int64_t scores;           // uint8: the key at `offset` of the zone has its score at
                            // offset + zone_begin % kScoreAlignment
  int64_t counts;           // (blocks that scan a head) ScanCounts
  int64_t flags;            // uint32: which blocks are done; see decode_flags.cuh
  int64_t masses;           // (slices, group, 2) float: maximum, sum of estimates
  int64_t windows;          // (group, rows of a window) uint64: logits in steps, the token above
  int64_t votes;            // (searchers, subspaces, 256) uint8
  int64_t candidates;       // (candidate_capacity) int32: offsets from zone_begin, ascending
  int64_t estimates;        // (searchers, candidate_capacity) float
  int64_t worth;            // (candidate_capacity) float
  int64_t selected;         // (rows) int32: indices into candidates, ascending
  int64_t rows;             // (rows) SelectedRow, of blocks with too many for their own list
  int64_t selected_count;   // int32
  int64_t candidate_count;  // int32
  int64_t resident;         // (kShards, group, 2 + head_dim) float: maximum, sum, weighted
  int64_t fetched;          // the same for the selected rows
  int64_t bytes;            // from head to head
};
constexpr int kScratchArrays = int(offsetof(ScratchLayout, bytes) / sizeof(int64_t));

/** Scores start at a multiple of this many positions, so that they can be moved in words. */
constexpr int64_t kScoreAlignment = 128;

/** Multiples of 8 bytes, as everything that the host writes word by word. */
struct Lane {
  const SequenceView* layers;  // (layers); null: nobody's row, left alone
  char* scratch;               // of the first head; the others follow
  int64_t zone_capacity;
  int64_t candidate_capacity;
  ScratchLayout at;
};

}  // namespace pariskv::cuda
