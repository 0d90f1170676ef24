/**
 * Where one layer of one sequence keeps its bytes: segments of a fixed number of tokens,
 * each a block of K and V rows and, once it holds retrieval tokens, a block of key
 * summaries. Segments are added and dropped at the end and never move.
 *
 * Blocks are shared by forks. Who writes into a block that somebody else holds too gets a
 * copy of it first, so nobody's past ever changes under them.
 *
 * A LayerStore is a value: `planned` makes the next one beside the current one, and may run
 * out of memory doing so; taking it over cannot fail.
 */
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "memory/arena.h"

namespace pariskv {

class LayerStore {
 public:
  /** Half-open ranges of positions that are about to be written. */
  struct Writes {
    int64_t rows_begin, rows_end;
    int64_t summaries_begin, summaries_end;
  };
  struct BlockBytes {
    int64_t rows, summaries;  // of one segment
  };
  using Copy = std::function<void(void* target, const void* source, int64_t bytes)>;

  /** True when `writes` fit in blocks that are there and nobody else's. */
  bool ready(int64_t segment_tokens, const Writes& writes) const;

  /** This store with room for `writes`. */
  LayerStore planned(int64_t segment_tokens, BlockBytes bytes, const Writes& writes, Arena& arena,
                     const Copy& copy) const;

  /** Drops whole segments: of rows from `total` on, of summaries outside [begin, end). */
  void drop(int64_t segment_tokens, int64_t total, int64_t zone_begin, int64_t zone_end) noexcept;

  void* const* rows() const { return row_table_.data(); }
  uint8_t* const* summaries() const { return summary_table_.data(); }

  /** Calls `visit(block)` for every block held. */
  template <typename Visit>
  void each_row_block(Visit visit) const {
    for (const auto& block : rows_) visit(*block);
  }
  template <typename Visit>
  void each_summary_block(Visit visit) const {
    for (const auto& block : summaries_) {
      if (block) visit(*block);
    }
  }

 private:
  using Blocks = std::vector<std::shared_ptr<Block>>;

  Blocks rows_;
  Blocks summaries_;  // as long as rows_; null where a segment has none
  std::vector<void*> row_table_;
  std::vector<uint8_t*> summary_table_;
};

}  // namespace pariskv
