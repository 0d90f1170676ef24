#include "cpu/cpu_backend.h"

#include "pariskv/cache.h"

namespace pariskv {

const char* cpu_level() { return cpu::best_kernels().name; }

namespace cpu {

std::unique_ptr<Backend> make_backend(int64_t threads) {
  return std::make_unique<CpuBackend>(threads);
}

}  // namespace cpu
}  // namespace pariskv
