/** Which queries of a prompt a search wants: windows of neighbours, evenly spaced. */
#pragma once

#include <algorithm>
#include <cstdint>

namespace pariskv {

struct QueryWindows {
  int64_t first = 0;  // position
  int64_t size = 1;   // positions of a window
  int64_t step = 1;   // from the begin of one window to that of the next
  int64_t count = 0;  // windows; 0: no query is wanted

  int64_t positions() const { return size * count; }

  /** Where the wanted position of this number is, in their order. */
  int64_t at(int64_t number) const { return first + number / size * step + number % size; }

  /** How many of them come before a position. */
  int64_t before(int64_t position) const {
    const int64_t behind = std::max(position - first, int64_t{0});
    const int64_t whole = behind / step;
    return whole >= count ? positions() : whole * size + std::min(behind % step, size);
  }
};

}  // namespace pariskv
