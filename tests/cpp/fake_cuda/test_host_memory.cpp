// How much host memory may be taken: what the system says, or the process's control group.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "fake.h"
#include "memory.h"
#include "pariskv/pariskv.h"

namespace pariskv::cuda {
namespace {

class HostMemoryLeft : public testing::Test {
 protected:
  HostMemoryLeft() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    // Others may run the same test on this machine.
    const std::string name = std::string("pariskv_") + test->name() + std::to_string(getpid());
    root_ = std::filesystem::temp_directory_path() / name;
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

TEST_F(HostMemoryLeft, IsUnknownWithoutAnyFile) { EXPECT_LT(left(), 0); }

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

TEST_F(HostMemoryLeft, OfTheGroupsThatItIsIn) {
  write_system();
  write("sys/fs/cgroup/a/b/memory.max", "5000\n");
  write("sys/fs/cgroup/a/b/memory.current", "1000\n");
  write("sys/fs/cgroup/a/memory.max", "9000\n");
  write("sys/fs/cgroup/a/memory.current", "8500\n");
  EXPECT_EQ(left(), 500);
}

TEST_F(HostMemoryLeft, RefusesMoreWithoutAskingTheSystem) {
  constexpr int64_t kMegabyte = 1 << 20;
  write("proc/meminfo", "MemAvailable:   614400 kB\n");  // 600 MB, of which 512 are others'
  const auto resource = pinned_resource(test::kDevice, root_.string());
  const int64_t asked = test::pinned_by_me();
  EXPECT_EQ(resource->allocate(90 * kMegabyte, 256), nullptr);
  EXPECT_EQ(test::pinned_by_me(), asked);
  void* some = resource->allocate(80 * kMegabyte, 256);
  EXPECT_NE(some, nullptr);
  EXPECT_GT(test::pinned_by_me(), asked);
  resource->deallocate(some, 80 * kMegabyte, 256);
}

TEST_F(HostMemoryLeft, TheErrorNamesTheRequestedBytes) {
  write("proc/meminfo", "MemAvailable:   614400 kB\n");
  Config config = test::small_config(1, 2, 2, 64);
  config.segment_tokens = 1 << 18;
  config.sink = 0;  // whose segment would stay on the device
  Resources resources;
  resources.pinned = pinned_resource(test::kDevice, root_.string());
  Cache cache(config, resources);
  const SequenceId sequence = cache.add();
  std::vector<uint16_t> numbers(size_t{300'000} * 2 * 64);
  const TensorView rows =
      TensorView::contiguous(numbers.data(), config.dtype, {300'000, 2, 64}, config.device);
  try {
    cache.prefill(0, {sequence}, {300'000}, rows, rows);
    FAIL() << "a segment of 128 MB was taken";
  } catch (const OutOfMemory& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("asked for 134217728 bytes of pinned host memory"), std::string::npos)
        << text;
  }
  EXPECT_EQ(cache.length(sequence), 0);
  EXPECT_EQ(test::wrong(), "");
}

}  // namespace
}  // namespace pariskv::cuda
