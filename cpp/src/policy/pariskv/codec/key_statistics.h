/**
 * How the statistics of a zone's keys, and the balance of its channels, lie in the state that is
 * kept per layer and sequence.
 */
#pragma once

#include "policy/pariskv/codec/block_means.h"
#include "policy/pariskv/codec/summary_layout.h"
#include "policy/pariskv/jobs.h"

namespace pariskv {

inline int64_t state_bytes_of(const SummaryLayout& layout, int64_t key_dim, Scorer scorer) {
  const int64_t numbers = 2 * layout.kv_heads * int64_t(sizeof(int64_t));
  if (layout.block > 0) {
    const int64_t channels = layout.kv_heads * key_dim;
    const int64_t of_channel =
        (kBalanceWindows + 2) * int64_t(sizeof(float)) + int64_t(sizeof(int16_t));
    return numbers + channels * of_channel + layout.kv_heads * int64_t(sizeof(float));
  }
  const int64_t sums = layout.kv_heads * layout.rotated_dim * int64_t(sizeof(int64_t));
  const int64_t counts = layout.kv_heads * layout.subspaces() * 256 * int64_t(sizeof(int32_t));
  return numbers + sums + (scorer == Scorer::kVotes ? counts : 0);
}

inline KeyStatistics key_statistics(const SummaryLayout& layout, Scorer scorer, void* state) {
  KeyStatistics statistics{};
  statistics.usable = static_cast<int64_t*>(state);
  statistics.square_units = statistics.usable + layout.kv_heads;
  if (layout.block > 0) return statistics;
  statistics.sums = statistics.square_units + layout.kv_heads;
  if (scorer == Scorer::kVotes) {
    statistics.counts =
        reinterpret_cast<int32_t*>(statistics.sums + layout.kv_heads * layout.rotated_dim);
  }
  return statistics;
}

inline Balance balance_of(const SummaryLayout& layout, int64_t key_dim, void* state) {
  Balance balance{};
  if (layout.block == 0) return balance;
  const int64_t channels = layout.kv_heads * key_dim;
  balance.query_squares =
      reinterpret_cast<float*>(static_cast<int64_t*>(state) + 2 * layout.kv_heads);
  balance.stretch = balance.query_squares + kBalanceWindows * channels;
  balance.gain = balance.stretch + channels;
  balance.centre_step = balance.gain + channels;
  balance.centre = reinterpret_cast<int16_t*>(balance.centre_step + layout.kv_heads);
  return balance;
}

}  // namespace pariskv
