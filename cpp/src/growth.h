/** Room in a vector, made ahead so that adding to it cannot fail. */
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pariskv {

/** Room for `size` elements in all; never less than twice what it was, so that many calls stay
 * cheap. */
template <typename T>
void make_room(std::vector<T>& vector, size_t size) {
  if (size > vector.capacity()) vector.reserve(std::max(size, 2 * vector.capacity()));
}

}  // namespace pariskv
