#include "backend.h"

#include "check.h"
#include "pariskv/cache.h"

namespace pariskv {

bool is_built(DeviceType device) { return device == DeviceType::kCpu; }

bool is_available(DeviceType device) { return is_built(device); }

std::unique_ptr<Backend> make_backend(const Config& config) {
  if (config.device.type == DeviceType::kCuda) {
    fail("[config] device: expected cpu, got cuda:", config.device.index,
         "; this build has no CUDA backend");
  }
  return cpu::make_backend(config.threads);
}

}  // namespace pariskv
