/** Text put together, without the standard library's streams: see cpp/src/check.h. */
#pragma once

#include <cstdio>
#include <string>
#include <type_traits>

namespace pariskv::python {

struct Text {
  std::string text;

  Text& operator<<(const std::string& part) {
    text += part;
    return *this;
  }
  Text& operator<<(const char* part) {
    text += part;
    return *this;
  }
  template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
  Text& operator<<(Number number) {
    if constexpr (std::is_integral_v<Number>) {
      text += std::to_string(number);
    } else {
      char digits[32];
      std::snprintf(digits, sizeof digits, "%g", double(number));
      text += digits;
    }
    return *this;
  }
};

}  // namespace pariskv::python
