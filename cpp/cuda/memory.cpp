#include "memory.h"

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
