/**
 * A search by ParisKV on its way through the CPU's verbs: the arrays of each sequence, cut from
 * scratch.
 */
#pragma once

#include "cpu/running.h"
#include "policy/pariskv/budget.h"
#include "policy/pariskv/codec/head_scale.h"
#include "policy/pariskv/plan.h"
#include "tail.h"

namespace pariskv::cpu {

/** The arrays of one sequence of a search. */
struct SearchItem {
  SequenceView sequence;
  ParisKVPlan plan;
  KeyStatistics statistics;
  Balance balance;
  Tail tail;                    // without rows where all of the zone are selected
  int64_t first_block;          // of the sequence, that the zone has keys of
  int64_t blocks;               // from there on; 0: keys are not told from means
  int64_t row;                  // in the batch
  float* rotated;               // (heads, searchers, rotated_dim) scaled query, see prepare_query
  int8_t* quantised;            // (heads, searchers, rotated_dim) -15 to 15
  HeadScale* scales;            // (heads, searchers)
  float* slope;                 // (heads, searchers)
  float* variance_term;         // (heads, searchers)
  float* offset;                // (heads, searchers)
  float* per_step;              // (heads, searchers); null without blocks
  int32_t* octave;              // (heads) see joined_score
  int32_t* block_steps;         // (heads, searchers, blocks) logits of means, in steps
  uint8_t* votes;               // (heads, searchers, subspaces, 256); null: not this scorer
  uint8_t* scores;              // (heads, zone)
  int32_t* histograms;          // (heads, segments of the zone, 256)
  int32_t* candidate;           // (heads, candidates + kCollectSlack) offsets from zone_begin
  int64_t* candidate_count;     // (heads)
  uint8_t* least;               // (heads) the score that a candidate has at least
  float* estimates;             // (heads, searchers, candidates) logits
  float* totals;                // (heads, searchers) log-sum-exps; infinite: has no say
  float* worth;                 // (heads, candidates)
  uint64_t* order;              // (heads, candidates) scratch of the last selection
  int32_t* selected;            // (heads, top_k) positions, best first; part of Selection
  int64_t* selected_count;      // (heads)
  float* selected_worth;        // (heads, top_k)
  int32_t* selected_candidate;  // (heads, top_k) index into candidate
  ErrorBudget* budget;          // (heads); null: nobody asks for an error
  float* candidate_scale;       // (heads, candidates) of a key's weights; null: no budget
  float* squares;               // (heads, candidates) of shares, mean over heads; null likewise
  uint64_t* mass;               // (heads) that was reached
  uint64_t* left;               // (heads) squares of candidates that were not taken
  float* error;                 // (heads) NaN where no query has a say
  int32_t* tail_number;         // (heads, tail_width) part of Selection
  int64_t* tail_count;          // (heads)
  uint8_t* tail_selected;       // (heads, tail_width) which rows of the tail are selected
  int32_t* tail_position;       // (tail_width) of the rows of the tail, for all heads; likewise

  int64_t candidates() const { return plan.candidates; }
};

/** A search of the zones, verb after verb over the same items. */
struct SearchArgs {
  const DecodeArgs& decode;
  const ParisKVRules& own;
  const Running& running;
  const std::vector<SearchItem>& items;

  const ModelShape& shape() const { return decode.shape; }
  const ParisKVRules& rules() const { return own; }
  const SummaryLayout& layout() const { return own.codec->layout; }
};

/** A collector may write this far past its last entry. */
constexpr int64_t kCollectSlack = 64;

}  // namespace pariskv::cpu
