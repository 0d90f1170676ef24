/**
 * Exact attention, cut into launches.
 *
 * Rows in host memory come over the bus once for all queries of a call: windows of segments are
 * copied to the device on a stream of their own, into a few places in turn, while windows before
 * are attended to. So do narrow rows, wherever they lie, and are plain in their places. Other rows
 * on the device are read where they lie. A few queries do not fill a GPU: then several blocks share
 * the rows.
 *
 *   copies   ████ 0 ████ 1 ████ 2 ··████ 3
 *   attends       ▒▒▒▒▒▒ 0 ▒▒▒▒▒▒ 1 ▒▒▒▒▒▒ 2 ▒▒▒▒▒▒ 3 finish
 */
#pragma once

#include <vector>

#include "kernels.h"
#include "memory/arena.h"
#include "runtime.h"

namespace pariskv::cuda {

/** Of a window, at most, unless a segment has more; tests make it small. */
int64_t& window_bytes();

class ExactAttention {
 public:
  explicit ExactAttention(Arena& arena) : arena_(arena) {}

  /**
   * @param whole   of one sequence: all rows, one launch
   * @param view    the same sequence, as the host knows it
   * @param hosted  segments whose rows are in host memory, ascending
   */
  void attend(const AttendExactCall& whole, const SequenceView& view,
              const std::vector<int64_t>& hosted, cudaStream_t stream);

  /** What stays from call to call: places for windows, states of queries. */
  int64_t scratch_bytes() const { return windows_.taken() + states_.taken(); }
  void clear() { windows_ = Block(), states_ = Block(); }

 private:
  /** Segments [begin, end) that one launch attends to. */
  struct Run {
    int64_t begin, end;
    bool brought;  // from host memory, or narrow
  };
  /** With one more than the two that are read and filled, the bus need not wait for a reader. */
  static constexpr int64_t kPlaces = 3;
  /** Room for a window. */
  struct Place {
    Event filled, read;
    bool taken = false;
  };

  static std::vector<Run> runs_of(const std::vector<int64_t>& hosted, int64_t segments,
                                  int64_t window);
  /** Room for so many bytes; false, or with `must` an OutOfMemory: there is none. */
  bool reserve(Block& block, int64_t bytes, bool must);
  void attend_to_runs(AttendExactCall call, const SequenceView& view, const std::vector<Run>& runs,
                      int64_t place_bytes, cudaStream_t stream);
  void bring(const Run& run, const ModelShape& shape, const SequenceView& view, char* target);

  Arena& arena_;
  Block windows_;
  Block states_;
  OwnStream copies_{true};  // blocks of threads copy, and attention leaves them no place
  Event begun_;
  Place places_[kPlaces];
};

}  // namespace pariskv::cuda
