#include "memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pinned.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

class DeviceResource : public MemoryResource {
 public:
  explicit DeviceResource(int32_t device) : device_(device) {}

  void* allocate(std::size_t bytes, std::size_t) override {
    const DeviceGuard guard(device_);
    void* data = nullptr;
    return succeeded(runtime().malloc(&data, bytes)) ? data : nullptr;
  }
  void deallocate(void* data, std::size_t, std::size_t) noexcept override {
    const DeviceGuard guard(device_);
    succeeded(cudaFree(data));
  }

 private:
  const int32_t device_;
};

/**
 * Bytes that the system could still give without swapping; negative when it does not say.
 * Pinned pages can never be swapped out, so taking more than these starves everybody.
 */
int64_t available_host_bytes() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/meminfo", "r"),
                                                             std::fclose);
  char line[128];
  while (file && std::fgets(line, sizeof line, file.get()) != nullptr) {
    constexpr char kName[] = "MemAvailable:";
    if (std::strncmp(line, kName, sizeof kName - 1) != 0) continue;
    return std::strtoll(line + sizeof kName - 1, nullptr, 10) * 1024;  // the file says kB
  }
  return -1;
}

class PinnedResource : public MemoryResource {
 public:
  explicit PinnedResource(int32_t device) : device_(device) {}

  void* allocate(std::size_t bytes, std::size_t) override {
    // What is left to the rest of the system: pages in use must not be driven out.
    constexpr int64_t kReserve = int64_t{512} << 20;
    const int64_t available = available_host_bytes();
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
};

}  // namespace

std::shared_ptr<MemoryResource> device_resource(int32_t device) {
  return std::make_shared<DeviceResource>(device);
}

std::shared_ptr<MemoryResource> pinned_resource(int32_t device) {
  return std::make_shared<PinnedResource>(device);
}

}  // namespace pariskv::cuda
