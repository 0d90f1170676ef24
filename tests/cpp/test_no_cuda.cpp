// A build without the CUDA backend says so, and how to get it.
#include <gtest/gtest.h>

#include <string>

#include "support.h"

namespace pariskv {
namespace {

TEST(NoCuda, SaysHowToGetIt) {
  if (is_built(DeviceType::kCuda)) GTEST_SKIP() << "is about builds without the CUDA backend";
  EXPECT_FALSE(is_available(DeviceType::kCuda));
  Config config = test::small_config();
  config.device = {DeviceType::kCuda, 0};
  try {
    Cache cache(config);
    FAIL() << "there is no such backend";
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("expected cpu, got cuda:0"), std::string::npos) << text;
    EXPECT_NE(text.find("install the CUDA toolkit, nvcc 12.8 or newer"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace pariskv
