/**
 * How the statistics of a zone's keys, and the balance of its channels, lie in the state that is
 * kept per layer and sequence.
 */
#pragma once

#include "policy/pariskv/codec/block_means.h"
#include "policy/pariskv/codec/summary_layout.h"
#include "policy/pariskv/jobs.h"

namespace pariskv {

/** Where the balance lies: bytes from the beginning of a state, and where it ends. */
struct BalancePlaces {
  int64_t query_squares, stretch, gain, centre_step, centre, end;

  static constexpr BalancePlaces of(const SummaryLayout& layout, int64_t key_dim) {
    const int64_t channels = layout.kv_heads * key_dim, number = int64_t(sizeof(float));
    const int64_t squares = 2 * layout.kv_heads * int64_t(sizeof(int64_t));
    const int64_t stretch = squares + kBalanceWindows * channels * number;
    const int64_t gain = stretch + channels * number, steps = gain + channels * number;
    const int64_t centre = steps + layout.kv_heads * number;
    return {squares, stretch, gain, steps, centre, centre + channels * int64_t(sizeof(int16_t))};
  }
};

inline int64_t state_bytes_of(const SummaryLayout& layout, int64_t key_dim, Scorer scorer) {
  if (layout.block > 0) return BalancePlaces::of(layout, key_dim).end;
  const int64_t numbers = 2 * layout.kv_heads * int64_t(sizeof(int64_t));
  const int64_t sums = layout.kv_heads * layout.rotated_dim * int64_t(sizeof(int64_t));
  const int64_t counts = layout.kv_heads * layout.subspaces() * 256 * int64_t(sizeof(int32_t));
  return numbers + sums + (scorer == Scorer::kVotes ? counts : 0);
}

/** The common part of narrow rows: the balance, and behind it that of V. */
inline NarrowLayout narrow_layout(const SummaryLayout& layout, const RowFormat& rows) {
  if (layout.block == 0) return {};
  const BalancePlaces at = BalancePlaces::of(layout, rows.key_dim);
  NarrowLayout narrow{};
  narrow.block = layout.block;
  narrow.key_dim = rows.key_dim, narrow.value_dim = rows.value_dim;
  narrow.stretch = at.stretch, narrow.gain = at.gain;
  narrow.centre_step = at.centre_step, narrow.centre = at.centre;
  narrow.based = at.end, narrow.values = at.end + int64_t(sizeof(int32_t));
  narrow.means = layout.means_at(0, 0), narrow.mean_steps = layout.steps_at(0, 0);
  narrow.blocks = layout.blocks(), narrow.mean_bytes = layout.rotated_dim;
  return narrow;
}
inline int64_t narrow_state_bytes(const NarrowLayout& narrow, int64_t kv_heads) {
  return narrow.any() ? int64_t(sizeof(int32_t)) + narrow.value_bytes(kv_heads) : 0;
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
  const BalancePlaces at = BalancePlaces::of(layout, key_dim);
  char* const first = static_cast<char*>(state);
  balance.query_squares = reinterpret_cast<float*>(first + at.query_squares);
  balance.stretch = reinterpret_cast<float*>(first + at.stretch);
  balance.gain = reinterpret_cast<float*>(first + at.gain);
  balance.centre_step = reinterpret_cast<float*>(first + at.centre_step);
  balance.centre = reinterpret_cast<int16_t*>(first + at.centre);
  return balance;
}

}  // namespace pariskv
