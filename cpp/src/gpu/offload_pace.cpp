#include "gpu/offload_pace.h"

#include <algorithm>
#include <utility>

namespace pariskv {

namespace {

// A prefill waits when this much is still to be copied from earlier ones: they would fill
// the device otherwise, for computing keys is faster than the bus.
constexpr int64_t kMostWaiting = int64_t{2} << 30;

// Steps that a flush's rows are sent in: far fewer than there are between flushes, and so many that
// few go at a time, for each costs the host three calls and the bus 75 microseconds.
constexpr size_t kStepsToLeave = 128;

}  // namespace

void OffloadPace::mark(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows,
                       Block target) {
  if (rows->leaving()) return;
  rows->mark_for_offload(std::move(target));
  rows_.push_back({rows, place, rows->bytes()});
}

void OffloadPace::start(size_t count, Stream stream) {
  while (started_ < count) started_ = start_some(rows_, started_, count, stream);
}

void OffloadPace::start_beside(bool quiet, Stream stream) {
  const bool was_quiet = std::exchange(quiet_, quiet);
  if (!quiet || !was_quiet || started_ > 0 || rows_.empty()) return;
  start(1 + rows_.size() / kStepsToLeave, stream);
}

size_t OffloadPace::overdue() const {
  int64_t bytes = 0;
  for (const MovingRows& marked : rows_) bytes += marked.bytes;
  size_t count = 0;
  while (bytes > kMostWaiting) bytes -= rows_[count++].bytes;
  return count;
}

void OffloadPace::forget_first(size_t count) {
  rows_.erase(rows_.begin(), rows_.begin() + std::ptrdiff_t(count));
  started_ -= std::min(count, started_);
}

}  // namespace pariskv
