/**
 * A search on its way through the CPU's verbs: what each sequence works on, cut from scratch.
 */
#pragma once

#include "codec/head_scale.h"
#include "ops.h"

namespace pariskv::cpu {

/** A block that is cut up anew for every call; over a null base it only adds up. */
class Cutter {
 public:
  explicit Cutter(char* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    const int64_t bytes = count * int64_t(sizeof(T));
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 64;
  char* base_;
  int64_t bytes_ = 0;
};

/** The running softmax of a batch, and the rows that were selected for it. */
struct Running {
  float* maximum;           // (batch, query_heads) largest logit
  float* sum;               // (batch, query_heads) sum of exp(logit - maximum)
  float* weighted;          // (batch, query_heads, head_dim) and of that times V
  int32_t* selected;        // (batch, heads, top_k) positions, best first
  int64_t* selected_count;  // (batch, heads)
};

/** What one sequence of a search works on. */
struct SearchItem {
  SequenceView sequence;
  KeyStatistics statistics;
  int64_t row;                  // in the batch
  float* rotated;               // (heads, searchers, rotated_dim) scaled query, see prepare_query
  int8_t* quantised;            // (heads, searchers, rotated_dim) -15 to 15
  HeadScale* scales;            // (heads, searchers)
  float* gain;                  // (heads, searchers)
  float* lift;                  // (heads, searchers)
  float* offset;                // (heads, searchers)
  uint8_t* votes;               // (heads, searchers, subspaces, 256); null: not this scorer
  uint8_t* scores;              // (heads, zone)
  int32_t* histograms;          // (heads, segments of the zone, 256)
  int32_t* candidate;           // (heads, candidates + kCollectSlack) offsets from zone_begin
  int64_t* candidate_count;     // (heads)
  uint8_t* least;               // (heads) the score that a candidate has at least
  float* estimates;             // (heads, searchers, candidates) logits
  float* worth;                 // (heads, candidates)
  uint64_t* order;              // (heads, candidates) scratch of the last selection
  int32_t* selected;            // (heads, top_k) positions, best first; part of Running
  int64_t* selected_count;      // (heads)
  float* selected_worth;        // (heads, top_k)
  int32_t* selected_candidate;  // (heads, top_k) index into candidate

  int64_t candidates() const { return sequence.candidates; }
};

/** A search of the zones, verb after verb over the same items. */
struct SearchArgs {
  const DecodeArgs& decode;
  const Running& running;
  const std::vector<SearchItem>& items;

  const ModelShape& shape() const { return decode.shape; }
  const SearchRules& rules() const { return decode.rules; }
};

/** A collector may write this far past its last entry. */
constexpr int64_t kCollectSlack = 64;

}  // namespace pariskv::cpu
