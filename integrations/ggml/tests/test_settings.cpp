// Settings as users write them, and sentences for what they get wrong.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "../src/settings.h"

namespace pariskv::ggml {
namespace {

std::string refusal(const std::string& text) {
  try {
    read_settings(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

TEST(Settings, AreReadFromText) {
  const Settings own = read_settings(" from = 8192, top_k=64,error=.2; check=1,,memory=512 ");
  EXPECT_EQ(own.from, 8192);
  EXPECT_EQ(own.top_k, 64);
  EXPECT_EQ(own.error, .2);
  EXPECT_TRUE(own.check);
  EXPECT_EQ(own.memory, 512);
  EXPECT_TRUE(own.on);
  EXPECT_FALSE(read_settings("on=0").on);
  EXPECT_EQ(read_settings("seed=0").seed, 0u);
  EXPECT_FALSE(read_settings("").seed);
  EXPECT_FALSE(read_settings("").from);
  EXPECT_EQ(read_settings("dense_below=8388608").dense_below, 8388608);
}

TEST(Settings, AreReadFromAFile) {
  const std::string path = testing::TempDir() + "pariskv_settings";
  std::ofstream(path) << "# of this machine\nfrom = 6000  # cells\n\ntop_k = 50, check = 1\r\n";
  const Settings own = read_settings("@" + path);
  EXPECT_EQ(own.from, 6000);
  EXPECT_EQ(own.top_k, 50);
  EXPECT_TRUE(own.check);
  std::remove(path.c_str());
  EXPECT_EQ(refusal("@" + path),
            "[PARISKV_GGML] @: expected the path of a file that can be read, got '" + path + "'");
}

TEST(Settings, AreRefusedWithASentence) {
  EXPECT_EQ(refusal("from=0"),
            "[PARISKV_GGML] from: expected a whole number of at least 1, got '0'");
  EXPECT_EQ(refusal("top_k=12x"),
            "[PARISKV_GGML] top_k: expected a whole number from 1 to 8388608, got '12x'");
  EXPECT_EQ(refusal("top_k="),
            "[PARISKV_GGML] top_k: expected a whole number from 1 to 8388608, got ''");
  EXPECT_EQ(
      refusal("from=99999999999999999999"),
      "[PARISKV_GGML] from: expected a whole number of at least 1, got '99999999999999999999'");
  EXPECT_EQ(refusal("seed=-1"),
            "[PARISKV_GGML] seed: expected a whole number of at least 0, got '-1'");
  // Limits of the engine's, named when the file is read and not when a cache is long enough.
  EXPECT_EQ(
      refusal("dense_below=8388609"),
      "[PARISKV_GGML] dense_below: expected a whole number from -1 to 8388608, got '8388609'");
  EXPECT_EQ(refusal("tail_rows=8"),
            "[PARISKV_GGML] tail_rows: expected a whole number from 16 to 8192, got '8'");
  EXPECT_NE(refusal("local=9000000"), "");
  EXPECT_NE(refusal("memory=9223372036854"), "");
  EXPECT_EQ(refusal("error=1"),
            "[PARISKV_GGML] error: expected a number above 0 and below 1, got '1'");
  EXPECT_EQ(refusal("error=nan"),
            "[PARISKV_GGML] error: expected a number above 0 and below 1, got 'nan'");
  EXPECT_EQ(refusal("check=yes"), "[PARISKV_GGML] check: expected 0 or 1, got 'yes'");
  EXPECT_EQ(refusal("check"), "[PARISKV_GGML] check: expected name=value, got 'check'");
  EXPECT_NE(refusal("gate=1").find("expected some of check, dense_below, error, from"),
            std::string::npos);
}

}  // namespace
}  // namespace pariskv::ggml
