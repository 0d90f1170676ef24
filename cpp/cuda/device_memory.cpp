#include "device_memory.h"

#include <algorithm>
#include <numeric>

#include "memory.h"
#include "memory/arena.h"
#include "row_format.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kMebi = int64_t{1} << 20;
constexpr int64_t kPiece = 64 * kMebi;
constexpr int64_t kMostUnit = 128 * kMebi;  // of which pieces are multiples
constexpr int64_t kMostChunks = 1 << 16;

int64_t round_up(int64_t bytes, int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

struct Bytes {
  int64_t free, all;
};

Bytes bytes_of(int32_t device) {
  const DeviceGuard guard(device);
  size_t free = 0, all = 0;
  check(cudaMemGetInfo(&free, &all), "ask for a device's memory");
  return {int64_t(free), int64_t(all)};
}

/** Rows that go to host memory when it is full leave some of the device to others. */
int64_t budget_of(const Config& config, const Resources& resources) {
  if (config.placement != Placement::kAuto || config.memory_budget > 0 || resources.device) {
    return config.memory_budget;
  }
  return std::max<int64_t>(bytes_of(config.device.index).free / 10 * 9, 1);
}

}  // namespace

DeviceMemory::Cut DeviceMemory::cut_of(const Config& config, int64_t most) {
  const auto rows_of = [&](const RowFormat& format) {
    const int64_t bytes = config.kv_heads * config.segment_tokens * format.bytes();
    return round_up(std::max<int64_t>(bytes, 1), kDeviceAlignment);
  };
  const RowFormat row = RowFormat::plain(config.head_dim, config.value_dim, config.dtype);
  Cut cut;
  cut.page = cut.chunk = rows_of(row);
  if (config.kv_dtype == KVDType::kAuto) {
    while (cut.chunk < most / kMostChunks) cut.chunk *= 2;
  } else {
    // Narrow rows take a few bytes more than half of that: two segments of them share a chunk.
    cut.chunk = cut.page = std::max(cut.page, 2 * rows_of(row.narrowed()));
  }
  const int64_t mapped = std::lcm(cut.chunk, kMappedBytes);
  cut.least = mapped <= kMostUnit ? mapped : cut.chunk;
  cut.most = std::max(cut.least, std::min(kPiece, most / 16) / cut.least * cut.least);
  return cut;
}

DeviceMemory::DeviceMemory(const Config& config, const Resources& resources)
    : budget_(budget_of(config, resources)) {
  if (resources.device) {
    resource_ = resources.device;
    return;
  }
  const int32_t device = config.device.index;
  resource_ = device_resource(device);
  if (!pooling()) return;
  const int64_t all = bytes_of(device).all;
  const Cut cut = cut_of(config, budget_ > 0 ? std::min(budget_, all) : all);
  if (cut.chunk > kPiece) return;  // as slabs they would leave most of themselves empty
  cut_ = cut;
  if (cut_.least % kMappedBytes == 0) range_ = Range::reserve(device, all + kMostUnit);
  std::shared_ptr<MemoryResource> pieces = resource_;
  if (range_) pieces = range_;
  chunks_ = std::make_shared<Chunks>(pieces, resource_, size_t(cut_.chunk), size_t(cut_.least),
                                     size_t(cut_.most), size_t(budget_));
  resource_ = chunks_;
}

}  // namespace pariskv::cuda
