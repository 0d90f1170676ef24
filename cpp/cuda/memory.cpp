#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "pinned.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

class DeviceResource : public MemoryResource {
 public:
  explicit DeviceResource(int32_t device) : device_(device) {}

  void* allocate(std::size_t bytes, std::size_t) override {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;  // memory that is taken ahead is taken by another thread
    void* data = nullptr;
    return succeeded(runtime().malloc(&data, bytes)) ? data : nullptr;
  }
  void deallocate(void* data, std::size_t, std::size_t) noexcept override {
    const DeviceGuard guard(device_);
    const RelaxedCaptureMode relaxed;
    succeeded(cudaFree(data));
  }

 private:
  const int32_t device_;
};

/** What follows `start` on the first line of a file that begins so; false: there is none. */
bool find_line(const std::string& path, const char* start, std::string& rest) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "r"),
                                                             std::fclose);
  char line[4096];
  const size_t length = std::strlen(start);
  while (file && std::fgets(line, sizeof line, file.get()) != nullptr) {
    if (std::strncmp(line, start, length) != 0) continue;
    line[std::strcspn(line, "\n")] = 0;
    return rest = line + length, true;
  }
  return false;
}

/** The number there; negative when there is none. */
int64_t find_number(const std::string& path, const char* start) {
  std::string rest;
  if (!find_line(path, start, rest)) return -1;
  char* end = nullptr;
  const int64_t number = std::strtoll(rest.c_str(), &end, 10);
  return end != rest.c_str() ? number : -1;  // "max" is no number
}

/** What is left of a control group's own limit; negative when it has none. */
int64_t left_of(const std::string& group) {
  const std::string file = group + "/memory.";
  const int64_t most = find_number(file + "max", ""), used = find_number(file + "current", "");
  if (most < 0 || used < 0) return -1;
  // Files that were read are given back when there is need.
  const int64_t files = std::max<int64_t>(find_number(file + "stat", "inactive_file "), 0);
  return std::max<int64_t>(most - used + files, 0);
}

/** What the control group of this process, and those it is in, may still take; or negative. */
int64_t left_to_group(const std::string& root) {
  std::string group;
  if (!find_line(root + "/proc/self/cgroup", "0::", group)) return -1;
  int64_t least = -1;
  while (true) {
    const int64_t left = left_of(root + "/sys/fs/cgroup" + group);
    if (left >= 0 && (least < 0 || left < least)) least = left;
    const size_t last = group.rfind('/');
    if (group.empty() || last == std::string::npos) return least;
    group.resize(last);
  }
}

class PinnedResource : public MemoryResource {
 public:
  PinnedResource(int32_t device, std::string root) : device_(device), root_(std::move(root)) {}

  void* allocate(std::size_t bytes, std::size_t) override {
    // What is left to the rest of the system: pages in use must not be driven out.
    constexpr int64_t kReserve = int64_t{512} << 20;
    const int64_t available = available_host_bytes(root_);
    if (available >= 0 && int64_t(bytes) > available - kReserve) return nullptr;
    const DeviceGuard guard(device_);
    void* data = nullptr;
    return succeeded(runtime().host_alloc(&data, bytes)) ? data : nullptr;
  }
  void deallocate(void* data, std::size_t bytes, std::size_t) noexcept override {
    const DeviceGuard guard(device_);
    succeeded(free_pinned(data, bytes));
  }

 private:
  const int32_t device_;
  const std::string root_;
};

}  // namespace

int64_t available_host_bytes(const std::string& root) {
  int64_t available = find_number(root + "/proc/meminfo", "MemAvailable:");
  if (available >= 0) available *= 1024;  // the file says kB
  const int64_t left = left_to_group(root);
  return left >= 0 && (available < 0 || left < available) ? left : available;
}

bool& pooling() {
#ifdef PARISKV_NO_POOLING
  static bool on = false;
#else
  static bool on = true;
#endif
  return on;
}

std::shared_ptr<MemoryResource> device_resource(int32_t device) {
  return std::make_shared<DeviceResource>(device);
}

std::shared_ptr<MemoryResource> pinned_resource(int32_t device, std::string root) {
  return std::make_shared<PinnedResource>(device, std::move(root));
}

}  // namespace pariskv::cuda
