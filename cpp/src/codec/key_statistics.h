/** How the statistics of a zone's keys lie in the block that is kept per layer and sequence. */
#pragma once

#include "policy/pariskv/upkeep.h"

namespace pariskv {

inline int64_t key_statistics_bytes(const ModelShape& shape, Scorer scorer) {
  const int64_t sums = shape.kv_heads * (2 + shape.rotated_dim) * int64_t(sizeof(int64_t));
  const int64_t counts = shape.kv_heads * shape.subspaces() * 256 * int64_t(sizeof(int32_t));
  return sums + (scorer == Scorer::kVotes ? counts : 0);
}

inline KeyStatistics key_statistics(const ModelShape& shape, Scorer scorer, void* state) {
  KeyStatistics statistics{};
  statistics.usable = static_cast<int64_t*>(state);
  statistics.square_units = statistics.usable + shape.kv_heads;
  statistics.sums = statistics.square_units + shape.kv_heads;
  if (scorer == Scorer::kVotes) {
    statistics.counts =
        reinterpret_cast<int32_t*>(statistics.sums + shape.kv_heads * shape.rotated_dim);
  }
  return statistics;
}

}  // namespace pariskv
