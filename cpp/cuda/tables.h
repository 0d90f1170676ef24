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
#include "pariskv/decode/scratch.h"

namespace pariskv::cuda {

/** Scores start at a multiple of this many positions, so that they can be moved in words. */
constexpr int64_t kScoreAlignment = 128;

/** Multiples of 8 bytes, as everything that the host writes word by word. */
struct Lane {
  const SequenceView* layers;  // (layers); null: nobody's row, left alone
  HeadScratch scratch;         // of the first head
  int64_t head_bytes;          // from a head's scratch to the next one's
  int64_t zone_capacity;
  int64_t candidate_capacity;
};

}  // namespace pariskv::cuda
