#include "backend.h"

#include "pariskv/cache.h"

namespace pariskv {

bool is_built(DeviceType device) { return device == DeviceType::kCpu || cuda::is_built(); }

bool is_available(DeviceType device) { return device == DeviceType::kCpu || cuda::is_available(); }

std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources) {
  return config.device.type == DeviceType::kCpu ? cpu::make_backend(config, resources)
                                                : cuda::make_backend(config, resources);
}

}  // namespace pariskv
