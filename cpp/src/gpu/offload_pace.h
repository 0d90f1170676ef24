/**
 * Rows on their way from a GPU to host memory, or back: marked when all of a segment lies in the
 * zone, or when there is room again; started a few at a time beside decode steps or all at once,
 * finished when their copy is done.
 */
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/moving_rows.h"
#include "growth.h"

namespace pariskv {

class OffloadPace {
 public:
  size_t size() const { return rows_.size(); }

  /** Room for so many more, so that `mark` cannot fail. */
  void make_room(size_t more) { pariskv::make_room(rows_, rows_.size() + more); }

  /** These rows are to go to `target`; a fork may have marked them already. */
  void mark(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows, Block target);

  /** The first `count` of the marked rows are on their way from now on. */
  void start(size_t count, Stream stream);
  void start_all(Stream stream) { start(rows_.size(), stream); }

  /**
   * Starts a few copies beside a step, and none while earlier ones travel, nor when this step or
   * the one before has keys to encode (`quiet` false), and then memory to recycle: the cost of a
   * flush is spread over steps, so that no step takes noticeably longer.
   */
  void start_beside(bool quiet, Stream stream);

  /** How many of the oldest a prefill has to wait for, so that the rest is not too much. */
  size_t overdue() const;

  /**
   * Calls `arrived(place, rows)` for rows whose copies are done, and waits for the `waited`
   * oldest. They are read where they are now. True when there were any.
   */
  template <typename Arrived>
  bool finish(size_t waited, Stream stream, Arrived arrived) {
    start(waited, stream);
    size_t done = 0;
    for (; done < rows_.size(); ++done) {
      const std::shared_ptr<RowBlock> rows = rows_[done].rows.lock();
      if (!rows || !rows->leaving()) continue;
      if (!rows->finish_offload(done < waited)) break;
      arrived(rows_[done].place, rows);
    }
    forget_first(done);
    return done > 0;
  }

 private:
  void forget_first(size_t count);

  std::vector<MovingRows> rows_;  // oldest first
  size_t started_ = 0;            // of them
  bool quiet_ = true;             // the last step encoded nothing
};

}  // namespace pariskv
