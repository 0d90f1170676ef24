/** What the fake CUDA and its tests share. */
#pragma once

#include <cstdint>
#include <string>

#include "pariskv/config.h"
#include "runtime.h"

namespace pariskv::test {

/** The one stream that is always being captured: a decode on it is like a replay. */
inline const cudaStream_t kCapturedStream = reinterpret_cast<cudaStream_t>(7);

/** What the fake kernels found wrong first; empty: nothing. */
std::string& wrong();

/** A small model on the fake device, in segments of 64 tokens. */
inline Config small_config(int64_t layers, int64_t query_heads, int64_t kv_heads, int64_t dim) {
  Config config;
  config.layers = layers;
  config.query_heads = query_heads;
  config.kv_heads = kv_heads;
  config.head_dim = dim;
  config.dtype = DType::kFloat16;
  config.local = 16;
  config.segment_tokens = 64;
  config.device = {DeviceType::kCuda, 0};
  return config;
}

/** Pieces of pinned memory that this thread has asked for. */
int64_t& pinned_by_me();

}  // namespace pariskv::test
