/** What the kernels of a decode leave for one another: the scratch of each kv head of a slot. */
#pragma once

#include <cstdint>

#include "policy/pariskv/rules.h"
#include "tables.h"

namespace pariskv::cuda {

/** Scores start at a multiple of this many positions, so that they can be moved in words. */
constexpr int64_t kScoreAlignment = 128;

namespace device {
struct ScoreCounts;
struct ChunkSums;
struct ErrorParts;
struct Mass;
struct SelectedRow;
}  // namespace device

/** The arrays of one kv head. All members are addresses: `of_head` moves all of them. */
struct HeadScratch {
  uint8_t* scores;              // the key at `offset` of the zone has its score at
                                // offset + zone_begin % kScoreAlignment
  device::ScoreCounts* counts;  // (kMostScoreBlocks)
  uint32_t* flags;              // (ReadyFlags::kCount)
  device::Mass* masses;         // (kSlices, group): of estimates
  uint64_t* windows;            // (group, kWindowRows): logits in steps, the token above
  int32_t* block_steps;         // (blocks of keys, steps_pitch): logits of means, in steps
  device::ChunkSums* chunks;    // (chunks of blocks, searchers)
  uint32_t* chunk_flags;        // (chunks of blocks)
  uint8_t* votes;               // (searchers, subspaces, 256)
  int32_t* candidates;          // (candidate_capacity) offsets from zone_begin, ascending
  float* estimates;             // (searchers, candidate_capacity)
  float* worth;                 // (candidate_capacity)
  int32_t* selected;            // (rows) indices into candidates, ascending
  device::SelectedRow* rows;    // (rows) of blocks with too many for their own list
  uint64_t* bin_squares;        // (kMaxCluster, kWorthBins) by worth, see policy/pariskv/budget.h,
                                // and behind them as many counts of 32 bits
  uint64_t* totals;             // (2, kMaxCluster) of a block's candidates, and masses of its rows
  float* scales;                // (candidate_capacity) of the keys' weights
  float* squares;               // (candidate_capacity) of shares, of blocks with no room for them
  device::ErrorParts* errors;   // (group)
  float* reached;               // (2) the mass, and the error that is left
  int32_t* candidate_count;     // (2) and of selected rows
  uint32_t* pieces_ended;       // (group) of a head that is attended to in full
  float* resident;              // (kParts, group, 2 + value_dim): maximum, sum, weighted
  float* fetched;               // the same for the selected rows
  float* sampled;               // and for rows of the tail
  float* tail_logits;           // (rows of the tail, group)
};

/** A sequence of a batch that ParisKV decodes. */
struct ParisKVSlot : BatchSlot {
  HeadScratch scratch;  // of the first head
  int64_t head_bytes;   // from a head's scratch to the next one's
  int64_t zone_capacity;
  int64_t candidate_capacity;
};

/** The scratch of a slot's heads, one after the other. */
struct SlotScratch {
  HeadScratch first;
  int64_t head_bytes;
};

/** Where the scratch of a slot lies, from `base` on; the capacities fix it. Null: for its size. */
SlotScratch lay_out_scratch(char* base, const ModelShape& shape, const ParisKVRules& rules,
                            int64_t zone_capacity, int64_t candidate_capacity);

}  // namespace pariskv::cuda
