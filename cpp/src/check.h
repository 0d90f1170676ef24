/**
 * Two words with two meanings: `fail` is the caller's mistake, PKV_ASSERT is ours.
 */
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pariskv/error.h"

namespace pariskv {

// No streams of the standard library: they ask the process's locale, and an extension module
// may come with a standard library that is not the one of its process.

inline std::string text_of(const std::string& text) { return text; }
inline std::string text_of(const char* text) { return text; }
template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
std::string text_of(Number number) {
  if constexpr (std::is_integral_v<Number>) {
    return std::to_string(number);
  } else {
    char text[32];
    std::snprintf(text, sizeof text, "%g", double(number));
    return text;
  }
}

/** Throws std::invalid_argument with the parts written one after the other. */
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string text;
  ((text += text_of(parts)), ...);
  throw std::invalid_argument(text);
}

}  // namespace pariskv

#define PKV_ASSERT(condition)                                                                      \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      throw ::pariskv::InternalError(std::string("pariskv broke its own promise: ") + #condition + \
                                     " (" + __FILE__ + ")");                                       \
    }                                                                                              \
  } while (false)
