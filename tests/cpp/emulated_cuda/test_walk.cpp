// Whole lives of caches, on emulated GPUs and on the CPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <tuple>

#include "apart.h"
#include "cases.h"
#include "exact/exact_attention.h"
#include "machine.h"
#include "memory.h"

namespace pariskv::test {

namespace {

/** PARISKV_SEEDS=20 runs every case with seeds 0 to 19. */
unsigned seeds() {
  const char* given = std::getenv("PARISKV_SEEDS");
  return given == nullptr ? 2 : unsigned(std::atoi(given));
}

class EmulatedWalk : public testing::TestWithParam<std::tuple<Case, unsigned>> {};

TEST_P(EmulatedWalk, EqualsTheCpu) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    GTEST_SKIP() << "waits for a processor with AVX2 and FMA";
  }
  const auto& [c, seed] = GetParam();
  emulator::begin(c.name + ", seed " + std::to_string(seed), seed);
  emulator::steps_apart = c.apart;
  cuda::pooling() = seed % 2 == 0;  // without, all blocks end where memory may not be touched
  cuda::window_bytes() = 1;         // every segment of rows comes to exact attention by itself
  const Outcome cpu = run(c, c.config);
  Config config = c.config;
  config.device = {DeviceType::kCuda, c.device};
  if (c.device_segment > 0) config.segment_tokens = c.device_segment;
  const Outcome cuda = run(c, config);
  compare(c, cpu, cuda, false);
  if (c.saved_after >= 0) {  // files are equal, so those of one backend are the other's, too
    Case stays = c;
    stays.saved_after = -1;
    Outcome never_saved = run(stays, config);
    never_saved.files = cuda.files;
    compare(c, never_saved, cuda, true);
  }
  if (c.replayed) {
    Case eager = c;
    eager.replayed = false;
    compare(c, run(eager, config), cuda, true);
  }
  if (c.twin < 0) return;
  config.device.index = c.twin;
  config.row_cache = 0;
  compare(c, cuda, run(c, config), true);
}

TEST(EmulatedCache, HoldsNextToNothingWhileIdle) {
  Config config;
  config.layers = 80, config.query_heads = 4, config.kv_heads = 2, config.head_dim = 64;
  config.device = {DeviceType::kCuda, 0};
  Cache cache(config);
  const Stats stats = cache.stats();
  EXPECT_LT(stats.memory.live, 1 << 20);
  EXPECT_EQ(stats.host_memory.reserved, 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedWalk,
                         testing::Combine(testing::ValuesIn(all_cases()),
                                          testing::Range(0u, seeds())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

}  // namespace pariskv::test
