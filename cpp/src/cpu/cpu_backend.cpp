#include "cpu/cpu_backend.h"

#include "pariskv/cache.h"

namespace pariskv {

const char* cpu_level() { return cpu::best_kernels().name; }

namespace cpu {

CpuBackend::CpuBackend(const Config& config, const Resources& resources)
    : kernels_(best_kernels()),
      stoppable_(bool(resources.should_stop)),
      pool_(config.threads, StopCheck(resources.should_stop)),
      arena_(resources.host ? resources.host : heap_resource(), config.memory_budget),
      pariskv_(kernels_, pool_),
      hardkv_(kernels_, pool_, scratch_),
      prkv_(kernels_, pool_, scratch_) {}

std::unique_ptr<Backend> make_backend(const Config& config, const Resources& resources) {
  return std::make_unique<CpuBackend>(config, resources);
}

}  // namespace cpu
}  // namespace pariskv
