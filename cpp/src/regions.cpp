#include "regions.h"

#include <algorithm>

namespace pariskv {

RegionCounts Regions::counts(const RegionSizes& sizes) const {
  // Before the sink is full a token belongs to the sink first, wherever the buffer begins.
  const int64_t window = retrieval_end(sizes);
  const int64_t buffer = std::max(buffer_begin_, window);
  return {sink_end(sizes), zone_tokens(sizes), buffer - window, total_ - buffer};
}

namespace {

/** Where a zone may end: the last multiple of the grain up to `position`; -1: there is none yet. */
int64_t whole_grains(int64_t position, const RegionSizes& sizes) {
  return position < sizes.opening ? -1 : position / sizes.grain * sizes.grain;
}

}  // namespace

bool Regions::reachable(const Marks& marks, const RegionSizes& sizes) {
  const auto within = [&](int64_t position) { return position >= 0 && position <= marks.total; };
  if (marks.total < 0 || !within(marks.retrieval_end) || !within(marks.buffer_begin)) return false;
  const Regions regions(marks);
  if (regions.zone_tokens(sizes) == 0) return true;
  return marks.retrieval_end == whole_grains(marks.retrieval_end, sizes);
}

Regions Regions::appended(int64_t tokens) const {
  Regions next = *this;
  next.total_ += tokens;
  return next;
}

Regions Regions::grown(int64_t tokens, const RegionSizes& sizes) const {
  Regions next = *this;
  for (int64_t i = 0; i < tokens; ++i) {
    next = next.appended();
    if (next.flush_due(sizes)) next = next.flushed(sizes);
  }
  return next;
}

Regions Regions::flushed(const RegionSizes& sizes) const {
  Regions next = *this;
  next.retrieval_end_ = std::max(retrieval_end(sizes), whole_grains(total_ - sizes.local, sizes));
  next.buffer_begin_ = total_;
  return next;
}

Regions Regions::prefilled(int64_t tokens, const RegionSizes& sizes) const {
  Regions next = *this;
  next.total_ += tokens;
  return next.flushed(sizes);
}

Regions Regions::truncated(int64_t tokens, const RegionSizes& sizes) const {
  Regions next = *this;
  next.total_ -= tokens;
  const int64_t window =
      std::min(retrieval_end(sizes), whole_grains(next.total_ - sizes.local, sizes));
  next.retrieval_end_ = std::max(window, next.sink_end(sizes));
  next.buffer_begin_ = std::min(buffer_begin_, next.total_);
  return next;
}

}  // namespace pariskv
