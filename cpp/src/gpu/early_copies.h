/**
 * Copies in host memory of rows that are still read on a GPU: room is then made by forgetting where
 * they were, and no call waits for a bus.
 */
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "gpu/moving_rows.h"

namespace pariskv {

class EarlyCopies {
 public:
  /** Bytes of rows that have their copy: what forgetting them would free. */
  int64_t done_bytes() const { return done_bytes_; }
  /** Of rows whose copy travels or is to. */
  int64_t under_way_bytes() const { return under_way_bytes_; }

  /** These rows are to have a copy in `target`. */
  void mark(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows, Block target);
  /** All that are marked are on their way from now on. */
  void start(Stream stream);
  /** Takes note of copies that are done; waits for the oldest if it is to. */
  void look(bool wait = false);

  using Taken = std::pair<MovingRows, std::shared_ptr<RowBlock>>;
  /** The oldest rows that have their copy; nothing: there are none. */
  std::optional<Taken> take();
  /** Rows that were taken and are to stay where they are. */
  void put_back(MovingRows rows);
  size_t done() const { return done_.size(); }

 private:
  std::deque<MovingRows> rows_;  // that have no copy yet, oldest first
  size_t started_ = 0;           // of them
  std::deque<MovingRows> done_;
  int64_t under_way_bytes_ = 0, done_bytes_ = 0;
};

}  // namespace pariskv
