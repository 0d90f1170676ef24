/** For tests of saved sequences: a folder that goes again, lives before and after a file. */
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "support.h"

namespace pariskv::test {

/** A folder for the length of a test. */
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "pariskv-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const char* name) const { return (path_ / name).string(); }
  int64_t files() const {
    return std::distance(std::filesystem::directory_iterator(path_),
                         std::filesystem::directory_iterator());
  }

 private:
  std::filesystem::path path_;
};

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline Config config_of(int64_t block = 64, Scorer scorer = Scorer::kSignNorm) {
  Config config = small_config();
  auto& policy = std::get<ParisKV>(config.policy);
  policy.block = block;
  policy.scorer = scorer;
  policy.tail_rows = 16;
  return config;
}

/** A sequence with a zone, a window and a buffer, some of its tokens taken back. */
inline SequenceId lived(Cache& cache, uint32_t& step) {
  Driver driver{cache, cache.add()};
  driver.prefill(1400, true);
  for (int i = 0; i < 30; ++i) driver.decode();
  cache.truncate({driver.sequence}, Cut::drop({25}));
  for (int i = 0; i < 3; ++i) driver.decode();
  step = driver.step;
  return driver.sequence;
}

/** What is done to a sequence afterwards, and everything that it puts out. */
inline std::vector<std::vector<float>> later(Cache& cache, SequenceId sequence, uint32_t step) {
  std::vector<std::vector<float>> all;
  Driver driver{cache, sequence, step};
  for (int i = 0; i < 20; ++i) all.push_back(driver.decode());
  all.push_back(driver.attend(50));
  Driver fork{cache, cache.fork(sequence), driver.step};
  for (int i = 0; i < 3; ++i) all.push_back(fork.decode());
  cache.remove(fork.sequence);
  cache.truncate({sequence}, Cut::drop({90}));
  for (int i = 0; i < 3; ++i) all.push_back(driver.decode());
  cache.flush({sequence});
  for (int i = 0; i < 20; ++i) all.push_back(driver.decode());
  cache.truncate({sequence}, Cut::keep({5}));  // the zone is gone, and comes anew
  driver.prefill(1300, true);
  for (int i = 0; i < 3; ++i) all.push_back(driver.decode());
  return all;
}

/** The sentence of a refusal. */
template <typename Error>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return {};
  }
  ADD_FAILURE() << "was not refused";
  return {};
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace pariskv::test
