/**
 * Two words with two meanings: `fail` is the caller's mistake, PKV_ASSERT is ours.
 */
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "pariskv/error.h"

namespace pariskv {

/** Throws std::invalid_argument with the parts written one after the other. */
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace pariskv

#define PKV_ASSERT(condition)                                                                      \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      throw ::pariskv::InternalError(std::string("pariskv broke its own promise: ") + #condition + \
                                     " (" + __FILE__ + ")");                                       \
    }                                                                                              \
  } while (false)
