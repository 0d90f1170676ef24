#include "cpu/cpu_backend.h"

#include "cpu/hardkv/search.h"
#include "cpu/pariskv/search.h"
#include "cpu/prkv/search.h"
#include "pariskv/cache.h"

namespace pariskv {

const char* cpu_level() { return cpu::best_kernels().name; }

namespace cpu {

CpuBackend::CpuBackend(const Config& config, const Resources& resources)
    : kernels_(best_kernels()),
      stoppable_(bool(resources.should_stop)),
      pool_(config.threads, StopCheck(resources.should_stop), resources.executor),
      arena_(resources.host ? resources.host : heap_resource(), config.memory_budget) {}

std::unique_ptr<Search> CpuBackend::make_search(const Config& config, const ModelShape& shape) {
  const CpuDevice device{kernels_, pool_, arena_};
  if (const auto* settings = std::get_if<ParisKV>(&config.policy)) {
    return std::make_unique<ParisKVSearch>(device, *settings, config, shape, *this);
  }
  if (const auto* settings = std::get_if<HardKV>(&config.policy)) {
    return std::make_unique<HardKVSearch>(device, *settings, config, shape);
  }
  if (const auto* settings = std::get_if<PRKV>(&config.policy)) {
    return std::make_unique<PRKVSearch>(device, *settings, config, shape, *this);
  }
  return Backend::make_search(config, shape);
}

std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources) {
  return std::make_unique<CpuBackend>(config, resources);
}

}  // namespace cpu
}  // namespace pariskv
