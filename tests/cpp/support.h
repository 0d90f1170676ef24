/** What several tests need: small caches, random rows, resources that misbehave. */
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "pariskv/pariskv.h"

namespace pariskv::test {

/** A small model whose sequences flush every few tokens and search from 64 tokens on. */
inline Config small_config() {
  Config config;
  config.layers = 1;
  config.query_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.dtype = DType::kFloat32;
  config.sink = 2;
  config.local = 8;
  config.update = 16;
  std::get<ParisKV>(config.policy).top_k = 4;
  std::get<ParisKV>(config.policy).block = 0;  // zones of blocks open with 1,024 tokens
  config.dense_below = 64;
  config.segment_tokens = 64;
  config.threads = 1;
  return config;
}

/** Rows of a float32 tensor (tokens, heads, head_dim). */
struct Rows {
  int64_t tokens, heads, dim;
  std::vector<float> data;

  Rows(int64_t tokens, int64_t heads, int64_t dim, uint32_t seed)
      : tokens(tokens), heads(heads), dim(dim), data(size_t(tokens * heads * dim)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : data) x = normal(random);
  }
  TensorView view() {
    return TensorView::contiguous(data.data(), DType::kFloat32, {tokens, heads, dim});
  }
};

/** Drives one sequence of a cache through prefill and decode with reproducible rows. */
struct Driver {
  Cache& cache;
  SequenceId sequence;
  uint32_t step = 0;

  const Config& config() const { return cache.config(); }

  void prefill(int64_t tokens, bool queries = false) {
    Rows k(tokens, config().kv_heads, config().head_dim, 1000 + step);
    Rows v(tokens, config().kv_heads, config().head_dim, 2000 + step);
    Rows q(tokens, config().query_heads, config().head_dim, 3000 + step);
    PrefillOptions options;
    if (queries) options.q = q.view();
    cache.prefill(0, {sequence}, {tokens}, k.view(), v.view(), options);
    ++step;
  }

  std::vector<float> attend(int64_t tokens) {
    Rows q(tokens, config().query_heads, config().head_dim, 3000 + step);
    Rows k(tokens, config().kv_heads, config().head_dim, 4000 + step);
    Rows v(tokens, config().kv_heads, config().head_dim, 5000 + step);
    Rows out(tokens, config().query_heads, config().head_dim, 0);
    cache.attend(0, {sequence}, {tokens}, q.view(), k.view(), v.view(), out.view());
    ++step;
    return out.data;
  }

  std::vector<float> decode() {
    Rows q(1, config().query_heads, config().head_dim, 3000 + step);
    Rows k(1, config().kv_heads, config().head_dim, 4000 + step);
    Rows v(1, config().kv_heads, config().head_dim, 5000 + step);
    Rows out(1, config().query_heads, config().head_dim, 0);
    cache.decode(0, {sequence}, q.view(), k.view(), v.view(), out.view());
    ++step;
    return out.data;
  }
};

/** Says no to one allocation, or to all from one on; counts what is out. */
class FailingResource : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment) override {
    const int64_t call = calls++;
    if (fail_at >= 0 && (call == fail_at || (forever && call > fail_at))) {
      if (call % 2 == 0) return nullptr;  // both ways to say no
      throw std::bad_alloc();
    }
    live += int64_t(bytes);
    return upstream->allocate(bytes, alignment);
  }
  void deallocate(void* data, std::size_t bytes, std::size_t alignment) noexcept override {
    live -= int64_t(bytes);
    upstream->deallocate(data, bytes, alignment);
  }

  std::shared_ptr<MemoryResource> upstream = heap_resource();
  int64_t calls = 0;
  int64_t live = 0;
  int64_t fail_at = -1;
  bool forever = false;
};

/** Never gives anything back to the system, so that what blocks leave behind can be read. */
class HoardingResource : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t) override {
    pieces.emplace_back(bytes / 64 + 2);
    auto address = reinterpret_cast<uintptr_t>(pieces.back().data());
    return reinterpret_cast<void*>((address + 63) / 64 * 64);
  }
  void deallocate(void*, std::size_t, std::size_t) noexcept override {}

  /** How often a 4-byte pattern lies anywhere in what was ever handed out. */
  int64_t count(uint32_t pattern) const {
    int64_t found = 0;
    for (const auto& piece : pieces) {
      const auto* words = reinterpret_cast<const uint32_t*>(piece.data());
      for (size_t i = 0; i < piece.size() * sizeof(Line) / 4; ++i) found += words[i] == pattern;
    }
    return found;
  }

 private:
  struct Line {
    char bytes[64] = {};
  };
  std::vector<std::vector<Line>> pieces;
};

}  // namespace pariskv::test
