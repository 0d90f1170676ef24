// How much host memory may be taken: what the system says, or the process's control group.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "memory.h"

namespace pariskv::cuda {
namespace {

class HostMemoryLeft : public testing::Test {
 protected:
  HostMemoryLeft() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::temp_directory_path() / (std::string("pariskv_") + test->name());
    std::filesystem::remove_all(root_);
  }
  ~HostMemoryLeft() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void write_system() const {
    write("proc/meminfo", "MemTotal:       9000 kB\nMemAvailable:   1000 kB\n");
    write("proc/self/cgroup", "4:memory:/old\n0::/a/b\n");
  }
  int64_t left() const { return available_host_bytes(root_.string()); }

  std::filesystem::path root_;
};

TEST_F(HostMemoryLeft, NobodySaysSo) { EXPECT_LT(left(), 0); }

TEST_F(HostMemoryLeft, OfTheSystem) {
  write_system();
  EXPECT_EQ(left(), 1'024'000);
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "900\n");
  EXPECT_EQ(left(), 1'024'000) << "the group has no limit";
}

TEST_F(HostMemoryLeft, OfTheGroup) {
  write_system();
  write("sys/fs/cgroup/a/b/memory.max", "5000\n");
  write("sys/fs/cgroup/a/b/memory.current", "4200\n");
  EXPECT_EQ(left(), 800);
  write("sys/fs/cgroup/a/b/memory.stat", "anon 7\ninactive_file 300\nactive_file 9\n");
  EXPECT_EQ(left(), 1100) << "files are given back";
  write("sys/fs/cgroup/a/b/memory.max", "3000\n");
  EXPECT_EQ(left(), 0) << "a limit that was lowered";
  write("sys/fs/cgroup/a/b/memory.max", "5000000000\n");
  EXPECT_EQ(left(), 1'024'000) << "the system has less";
}

}  // namespace
}  // namespace pariskv::cuda
