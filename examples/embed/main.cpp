// The smallest program around the engine: one sequence, a prompt, some decode steps.
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "pariskv/pariskv.h"

namespace {

constexpr int64_t kLayers = 2;
constexpr int64_t kQueryHeads = 8;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadDim = 64;
constexpr int64_t kPrompt = 20'000;
constexpr int64_t kSteps = 32;

std::vector<float> random_values(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

pariskv::TensorView view(std::vector<float>& values, int64_t tokens, int64_t heads) {
  return pariskv::TensorView::contiguous(values.data(), pariskv::DType::kFloat32,
                                         {tokens, heads, kHeadDim});
}

void run() {
  pariskv::Config config;
  config.layers = kLayers;
  config.query_heads = kQueryHeads;
  config.kv_heads = kKvHeads;
  config.head_dim = kHeadDim;
  config.dtype = pariskv::DType::kFloat32;
  pariskv::Cache cache(config);

  std::mt19937 random(1);
  const pariskv::SequenceId sequence = cache.add();
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    auto k = random_values(kPrompt * kKvHeads * kHeadDim, random);
    auto v = random_values(kPrompt * kKvHeads * kHeadDim, random);
    cache.prefill(layer, {sequence}, {kPrompt}, view(k, kPrompt, kKvHeads),
                  view(v, kPrompt, kKvHeads));
  }

  std::vector<float> out(kQueryHeads * kHeadDim);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      auto q = random_values(kQueryHeads * kHeadDim, random);
      auto k = random_values(kKvHeads * kHeadDim, random);
      auto v = random_values(kKvHeads * kHeadDim, random);
      cache.decode(layer, {sequence}, view(q, 1, kQueryHeads), view(k, 1, kKvHeads),
                   view(v, 1, kKvHeads), view(out, 1, kQueryHeads));
    }
  }

  const pariskv::RegionCounts regions = cache.regions(sequence);
  const pariskv::Stats stats = cache.stats();
  std::printf("pariskv %s on %s: %lld tokens in each of %lld layers\n", PARISKV_VERSION_STRING,
              pariskv::cpu_level(), static_cast<long long>(cache.length(sequence)),
              static_cast<long long>(kLayers));
  std::printf("sink %lld, retrieval %lld, local %lld, buffer %lld\n",
              static_cast<long long>(regions.sink), static_cast<long long>(regions.retrieval),
              static_cast<long long>(regions.local), static_cast<long long>(regions.buffer));
  std::printf("%lld searches reranked %lld candidates and fetched %lld rows; %.1f MiB held\n",
              static_cast<long long>(stats.searched_tokens),
              static_cast<long long>(stats.candidates), static_cast<long long>(stats.fetched_rows),
              static_cast<double>(stats.memory.live) / (1 << 20));
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
