/**
 * Where fetched rows stay on a GPU, one block per layer and sequence:
 *
 *   tags    (kv_heads, slots) uint64   whose row a slot has: generation << 32 | position + 1
 *   stamps  (kv_heads, slots) uint32   the step that last selected it
 *   rows    (kv_heads, slots, row_bytes)
 *
 * Slots come in sets of four; a position can only be in the slots of one set. Slots with a tag
 * of 0 are free, and so are slots of an older generation.
 */
#pragma once

#include <cstdint>

namespace pariskv {

constexpr int64_t kCacheWays = 4;

/** The slots of a cache of so many rows; 0: no cache. */
constexpr int64_t row_cache_slots(int64_t rows) {
  if (rows == 0) return 0;
  int64_t slots = 4 * kCacheWays;
  while (slots < rows) slots *= 2;
  return slots;
}

struct RowCacheLayout {
  int64_t kv_heads;
  int64_t slots;  // of a kv head
  int64_t row_bytes;

  constexpr int64_t stamps() const { return kv_heads * slots * 8; }
  /** All that has to be zero at first lies before the rows. */
  constexpr int64_t rows() const { return (kv_heads * slots * 12 + 255) / 256 * 256; }
  constexpr int64_t bytes() const { return rows() + kv_heads * slots * row_bytes; }
};

}  // namespace pariskv
