/** What the programs at the end of recipes share: a small cache with random rows. */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pariskv/pariskv.h"

#define expect(what)                                                        \
  do {                                                                      \
    if (what) break;                                                        \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
    std::exit(1);                                                           \
  } while (false)

namespace pariskv {

/** One layer that searches whatever its length. */
inline Config small_config() {
  Config config;
  config.query_heads = 4, config.kv_heads = 2, config.head_dim = 64;
  config.dtype = DType::kFloat32;
  config.dense_below = 0;
  return config;
}

/** A cache with one sequence; the same numbers for equal sizes. */
struct Filled {
  Config config;
  Cache cache;
  SequenceId sequence;
  std::vector<float> k, v;  // (tokens, kv_heads, head_dim) of the prompt
  std::vector<float> q, out;
  std::mt19937 random{7};

  Filled(const Config& wanted, int64_t tokens)
      : config(wanted), cache(wanted), sequence(cache.add()) {
    k = numbers(tokens * config.kv_heads), v = numbers(tokens * config.kv_heads);
    q = numbers(config.query_heads), out = numbers(config.query_heads);
    cache.prefill(0, {sequence}, {tokens}, view(k, config.kv_heads), view(v, config.kv_heads));
  }

  /** One token more; its output. */
  const std::vector<float>& decode() {
    std::vector<float> own_k = numbers(config.kv_heads), own_v = numbers(config.kv_heads);
    cache.decode(0, {sequence}, view(q, config.query_heads), view(own_k, config.kv_heads),
                 view(own_v, config.kv_heads), view(out, config.query_heads));
    return out;
  }
  Explanation explain() {
    const TensorView one = TensorView::contiguous(
        q.data(), DType::kFloat32, {config.query_heads, config.head_dim}, config.device);
    return cache.explain(0, sequence, one);
  }

  TensorView view(std::vector<float>& rows, int64_t heads) const {
    const int64_t tokens = int64_t(rows.size()) / (heads * config.head_dim);
    return TensorView::contiguous(rows.data(), DType::kFloat32, {tokens, heads, config.head_dim},
                                  config.device);
  }

 private:
  std::vector<float> numbers(int64_t rows) {
    std::normal_distribution<float> normal;
    std::vector<float> made(size_t(rows * config.head_dim));
    for (float& x : made) x = normal(random);
    return made;
  }
};

/** The largest difference of two outputs. */
inline float apart(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(a[i] - b[i]));
  return most;
}

}  // namespace pariskv

using namespace pariskv;
