/**
 * Where one layer of one sequence keeps its bytes: K and V rows in blocks of a fixed number of
 * tokens, and for each segment, once it holds retrieval tokens, a block of key summaries. On a GPU
 * a block of rows is a segment; on a CPU a segment has several. Blocks are added and dropped at the
 * end and never move, save that rows may go to host memory once all of them are in the zone.
 *
 * Blocks are shared by forks. A sequence that writes into a shared block copies it first, so a
 * fork's past never changes under it.
 *
 * A store never is half changed: `planned` makes what will be different beside what is there, and
 * may run out of memory doing so; taking that over cannot fail. What stays is not touched: long
 * sequences have thousands of blocks, and a step changes the last few.
 */
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "memory/arena.h"

namespace pariskv {

/** A block of rows: where verbs work, in host memory, or on their way there. */
class RowBlock {
 public:
  /** @param offloads null: these rows never leave */
  RowBlock(Offloads* offloads, Block block) : offloads_(offloads), block_(std::move(block)) {}
  ~RowBlock() {
    if (ticket_ == 0) return;
    block_.hold(Holds::kOther);
    offloads_->adopt(std::move(block_), std::move(target_), ticket_);
  }

  void* data() const { return block_.data(); }
  int64_t bytes() const { return block_.bytes(); }
  bool offloaded() const { return offloaded_; }
  bool leaving() const { return target_.data() != nullptr; }

  /** The rows are to go to `target`, in the other memory, and are not written any more. */
  void mark_for_offload(Block target) { target_ = std::move(target); }

  /** Starts the copies there, which see what `stream` has done so far; they are done together. */
  static void start_offloads(const std::vector<std::shared_ptr<RowBlock>>& rows, Stream stream) {
    std::vector<RowCopy> copies;
    for (const auto& own : rows) {
      copies.push_back({own->target_.data(), own->block_.data(), own->block_.bytes()});
    }
    if (copies.empty()) return;
    const int64_t ticket = rows.front()->offloads_->start_offload(copies, stream);
    for (const auto& own : rows) own->ticket_ = ticket;
  }

  /** Whether the copy is done. The rows are still read where they were. */
  bool copied() const { return ticket_ != 0 && offloads_->offloaded(ticket_); }
  void wait_copied() const { offloads_->wait_offloaded(ticket_); }

  /** Once the copy is done the rows are in the other memory; true if that has just become so. */
  bool finish_offload(bool wait) {
    if (ticket_ == 0) return false;
    if (wait) offloads_->wait_offloaded(ticket_);
    if (!offloads_->offloaded(ticket_)) return false;
    block_ = std::move(target_);
    block_.hold(Holds::kRows);
    target_ = Block();
    ticket_ = 0;
    offloaded_ = !offloaded_;
    return true;
  }

 private:
  Offloads* offloads_;
  Block block_;
  Block target_;
  int64_t ticket_ = 0;  // of a copy under way
  bool offloaded_ = false;
};

class LayerStore {
 public:
  /** Tokens of a block of rows, and of a segment: a multiple. */
  struct Tokens {
    int64_t rows, segment;
  };
  explicit LayerStore(Tokens tokens = {1, 1}) : tokens_(tokens) {}

  /** Writes that are about to happen: half-open ranges of positions. */
  struct Writes {
    int64_t rows_begin, rows_end;
    int64_t summaries_begin, summaries_end;
    int64_t zone_begin, zone_end;  // rows outside have to be where verbs work
  };
  struct BlockBytes {
    int64_t rows, summaries;
  };

  /** The blocks that a store will hold and does not hold yet, and its tables after that. */
  class Growth {
   public:
    int64_t row_blocks() const { return int64_t(row_table_.size()); }
    void* const* rows() const { return row_table_.data(); }
    uint8_t* const* summaries() const { return summary_table_.data(); }

   private:
    friend class LayerStore;
    std::vector<std::pair<int64_t, std::shared_ptr<RowBlock>>> row_blocks_;   // by number
    std::vector<std::pair<int64_t, std::shared_ptr<Block>>> summary_blocks_;  // by segment
    std::vector<void*> row_table_;
    std::vector<uint8_t*> summary_table_;
  };

  /** True when `writes` fit in blocks that are there, not shared, and in the right memory. */
  bool ready(const Writes& writes) const;

  /** Positions from `total` on that have rows which are there, this store's own and staying. */
  int64_t room_behind(int64_t total) const;

  /** The growth that makes room for `writes`. */
  Growth planned(BlockBytes bytes, const Writes& writes, Backend& backend, Stream stream);
  void grow(Growth growth) noexcept;

  /** Gives segments [first, last) back, but for their place; other stores may still have them. */
  void give_back(int64_t first, int64_t last) noexcept;
  /** The same of blocks of rows. One that is written to again has other rows by then. */
  void give_back_rows(int64_t first, int64_t last) noexcept;

  /** Drops whole blocks: of rows from `total` on, of summaries outside [begin, end). */
  void drop(int64_t total, int64_t zone_begin, int64_t zone_end) noexcept;

  int64_t row_blocks() const { return int64_t(rows_.size()); }
  void* const* rows() const { return row_table_.data(); }
  uint8_t* const* summaries() const { return summary_table_.data(); }
  /** Null: its rows were given back. */
  const std::shared_ptr<RowBlock>& row_block(int64_t number) const { return rows_[number]; }
  /** The same, once it will have grown. */
  const std::shared_ptr<RowBlock>& row_block(int64_t number, const Growth& growth) const;

  /** Blocks with rows in host memory, ascending; with a growth, once it will have grown. */
  std::vector<int64_t> hosted(const Growth* growth = nullptr) const;

  /** Notes that a block's rows have come to lie elsewhere. */
  void row_moved(int64_t number) noexcept;
  /** Whether some are in host memory, or may be. */
  bool has_moved() const { return has_moved_; }

 private:
  Tokens tokens_;
  std::vector<std::shared_ptr<RowBlock>> rows_;    // null: given back
  std::vector<std::shared_ptr<Block>> summaries_;  // of all segments; null where there are none
  std::vector<void*> row_table_;
  std::vector<uint8_t*> summary_table_;
  bool has_moved_ = false;
};

}  // namespace pariskv
