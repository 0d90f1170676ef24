/**
 * Kept rows: rows of a zone that were chosen ahead of the queries that attend to them. They lie
 * together, per kv head, beside the rows that are always attended to. A block per layer and
 * sequence:
 *
 *   counts    (heads, 2) int32         attended to; held: not attended to, but not forgotten yet
 *   positions (heads, capacity) int32  the attended ones, then the held ones, each ascending
 *   ages      (heads, capacity) uint8  choices since a row was attended to; 0: it is
 *   rows      (heads, capacity) rows   see RowFormat
 *
 * A block never changes once it is filled: another choice fills another block. So a call that fails
 * changes nothing, and forks share a block.
 */
#pragma once

#include <cstdint>

namespace pariskv {

struct KeptLayout {
  int64_t heads;
  int64_t capacity;  // rows of a head
  int64_t row_bytes;

  constexpr int64_t positions_offset() const { return heads * 8; }
  constexpr int64_t ages_offset() const { return positions_offset() + heads * capacity * 4; }
  constexpr int64_t rows_offset() const {
    return (ages_offset() + heads * capacity + 63) / 64 * 64;
  }
  constexpr int64_t bytes() const { return rows_offset() + heads * capacity * row_bytes; }

  int32_t* counts(char* block, int64_t head) const {
    return reinterpret_cast<int32_t*>(block) + head * 2;
  }
  int32_t* positions(char* block, int64_t head) const {
    return reinterpret_cast<int32_t*>(block + positions_offset()) + head * capacity;
  }
  uint8_t* ages(char* block, int64_t head) const {
    return reinterpret_cast<uint8_t*>(block + ages_offset()) + head * capacity;
  }
  char* row(char* block, int64_t head, int64_t i) const {
    return block + rows_offset() + (head * capacity + i) * row_bytes;
  }
};

}  // namespace pariskv
