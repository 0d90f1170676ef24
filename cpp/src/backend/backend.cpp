#include "backend/backend.h"

#include "check.h"
#include "exact_search.h"
#include "pariskv/cache.h"

namespace pariskv {

std::unique_ptr<Search> Backend::make_search(const Config&, const ModelShape& shape) {
  return std::make_unique<ExactSearch>(shape, *this);
}

bool is_built(DeviceType device) {
  switch (device) {
    case DeviceType::kCpu:
      return true;
    case DeviceType::kCuda:
      return cuda::is_built();
  }
  return false;
}

bool is_available(DeviceType device) {
  switch (device) {
    case DeviceType::kCpu:
      return true;
    case DeviceType::kCuda:
      return cuda::is_available();
  }
  return false;
}

std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources) {
  switch (config.device.type) {
    case DeviceType::kCpu:
      return cpu::make_backend(config, resources);
    case DeviceType::kCuda:
      return cuda::make_backend(config, resources);
  }
  fail("[config] device: expected cpu or cuda");
}

}  // namespace pariskv
