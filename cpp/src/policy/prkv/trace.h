/** How a step found pages, as a backend reports it. */
#pragma once

#include <cstdint>
#include <vector>

namespace pariskv {

struct PRKVTrace {
  int64_t static_rows;                          // that the budget has for kept rows
  std::vector<std::vector<float>> scores;       // (heads, pages of the zone) -infinity: no page
  std::vector<std::vector<int64_t>> pages;      // (heads) that were found, best first
  std::vector<std::vector<int32_t>> positions;  // (heads) their rows, page by page
  std::vector<std::vector<int32_t>> kept;       // (heads) that are attended to besides
};

}  // namespace pariskv
