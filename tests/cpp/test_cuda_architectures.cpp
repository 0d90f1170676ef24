// Which GPUs a build is for is known without any.
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <string>

#include "kernels.h"

namespace pariskv {
namespace {

TEST(CudaArchitectures, AreTheOnesThatAreNamed) {
  const std::string text = cuda::code_text();
  const std::regex number("([0-9]+)\\.([0-9])");
  int named = 0, first = 1 << 10, last = 0;
  for (std::sregex_iterator at(text.begin(), text.end(), number), end; at != end; ++at, ++named) {
    const int major = std::stoi((*at)[1]), minor = std::stoi((*at)[2]);
    EXPECT_TRUE(cuda::has_code_for(major, minor)) << text;
    first = std::min(first, major), last = std::max(last, major);
  }
  EXPECT_GT(named, 0) << text;
  EXPECT_FALSE(cuda::has_code_for(first - 1, 9)) << text;
  EXPECT_FALSE(cuda::has_code_for(7, 5)) << text;
  const bool newer = text.find("and newer") != std::string::npos;
  EXPECT_EQ(cuda::has_code_for(last + 1, 0), newer) << text;
}

}  // namespace
}  // namespace pariskv
