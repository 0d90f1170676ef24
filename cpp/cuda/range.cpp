#include "range.h"

#include "driver.h"
#include "runtime.h"

namespace pariskv::cuda {

std::shared_ptr<Range> Range::reserve(int32_t device, int64_t most) {
  if (!driver().complete) return nullptr;
  const DeviceGuard guard(device);
  const RelaxedCaptureMode relaxed;
  const int64_t bytes = (most + kMappedBytes - 1) / kMappedBytes * kMappedBytes;
  CUdeviceptr address = 0;
  if (driver().reserve(&address, size_t(bytes), size_t(kMappedBytes), 0, 0) != CUDA_SUCCESS) {
    return nullptr;
  }
  return std::shared_ptr<Range>(new Range(device, reinterpret_cast<char*>(address), bytes));
}

Range::Range(int32_t device, char* data, int64_t bytes)
    : device_(device), data_(data), bytes_(bytes) {}

Range::~Range() {
  const DeviceGuard guard(device_);
  driver().unreserve(reinterpret_cast<CUdeviceptr>(data_), size_t(bytes_));
}

void* Range::allocate(std::size_t bytes, std::size_t) {
  const int64_t wanted = int64_t(bytes);
  if (wanted % kMappedBytes != 0) return nullptr;
  const DeviceGuard guard(device_);
  const RelaxedCaptureMode relaxed;
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t at = 0;
  for (const auto& [offset, taken] : pieces_) {
    if (offset - at >= wanted) break;
    at = offset + taken;
  }
  if (at + wanted > bytes_) return nullptr;
  const auto piece = pieces_.emplace(at, wanted).first;
  if (succeeded(runtime().map(data_ + at, bytes, device_))) return data_ + at;
  pieces_.erase(piece);
  return nullptr;
}

void Range::deallocate(void* data, std::size_t bytes, std::size_t) noexcept {
  const DeviceGuard guard(device_);
  const RelaxedCaptureMode relaxed;
  const std::lock_guard<std::mutex> lock(mutex_);
  driver().unmap(reinterpret_cast<CUdeviceptr>(data), bytes);
  pieces_.erase(static_cast<char*>(data) - data_);
}

}  // namespace pariskv::cuda
