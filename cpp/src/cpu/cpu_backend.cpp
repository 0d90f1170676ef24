#include "cpu/cpu_backend.h"

#include <algorithm>

#include "cpu/hardkv/search.h"
#include "cpu/pariskv/search.h"
#include "cpu/prkv/search.h"
#include "memory/available.h"
#include "memory/touch.h"
#include "pariskv/cache.h"

namespace pariskv {

const char* cpu_level() { return cpu::best_kernels().name; }

namespace cpu {

namespace {

/** @param heap  whether memory is the system's, not a program's own */
ArenaTraits traits_of(std::function<void(void*, int64_t)> touch, bool heap) {
  ArenaTraits traits;
  traits.touch = std::move(touch);
  if (heap) traits.check_ahead = &check_available;
  return traits;
}

}  // namespace

CpuBackend::CpuBackend(const Config& config, const Resources& resources)
    : kernels_(best_kernels()),
      stoppable_(bool(resources.should_stop)),
      pool_(config.threads, StopCheck(resources.should_stop), resources.executor),
      arena_(
          resources.host ? resources.host : heap_resource(), config.memory_budget,
          traits_of([this](void* data, int64_t bytes) { touch(data, bytes); }, !resources.host)) {}

void CpuBackend::touch(void* data, int64_t bytes) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  pool_.parallel_for((bytes + kPiece - 1) / kPiece, [&](int64_t i) {
    touch_pages_here(static_cast<char*>(data) + i * kPiece, std::min(kPiece, bytes - i * kPiece));
  });
}

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
