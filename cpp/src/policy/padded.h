/** Arrays of heads that differ in length, in one array for an Explanation. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pariskv {

/** Appends the arrays of all heads, each padded to the longest; returns its length. */
template <typename From, typename To>
int64_t padded(const std::vector<std::vector<From>>& heads, To padding, std::vector<To>& out) {
  size_t width = 0;
  for (const auto& head : heads) width = std::max(width, head.size());
  for (const auto& head : heads) {
    out.insert(out.end(), head.begin(), head.end());
    out.insert(out.end(), width - head.size(), padding);
  }
  return int64_t(width);
}

}  // namespace pariskv
