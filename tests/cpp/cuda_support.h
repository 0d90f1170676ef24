/** What tests of the CUDA backend share: rows on the device, calls that fail when told to. */
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "runtime.h"
#include "support.h"

namespace pariskv::test {

#define PKV_NEEDS_GPU()                                                               \
  do {                                                                                \
    if (!is_available(DeviceType::kCuda)) GTEST_SKIP() << "needs a GPU and a driver"; \
  } while (false)

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/** Not from the table that tests replace: what a test needs for itself never fails. */
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    must(cudaMalloc(&data_, bytes > 0 ? bytes : 1));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  const size_t bytes_;
};

/** Rows of a float32 tensor (tokens, heads, head_dim) on the device. */
struct DeviceRows {
  Rows host;
  DeviceMemory memory;

  DeviceRows(int64_t tokens, int64_t heads, int64_t dim, uint32_t seed)
      : host(tokens, heads, dim, seed), memory(host.data.size() * sizeof(float)) {
    must(cudaMemcpy(memory.data(), host.data.data(), memory.bytes(), cudaMemcpyHostToDevice));
  }
  TensorView view() const {
    return TensorView::contiguous(memory.data(), DType::kFloat32,
                                  {host.tokens, host.heads, host.dim}, {DeviceType::kCuda, 0});
  }
  std::vector<float> download() const {
    std::vector<float> data(host.data.size());
    must(cudaMemcpy(data.data(), memory.data(), memory.bytes(), cudaMemcpyDeviceToHost));
    return data;
  }
};

/** Drives one sequence of a cache on the GPU with reproducible rows. */
struct DeviceDriver {
  Cache& cache;
  SequenceId sequence;
  uint32_t step = 0;

  const Config& config() const { return cache.config(); }

  DeviceRows rows(int64_t tokens, uint32_t seed) const {
    return {tokens, config().kv_heads, config().head_dim, seed + step};
  }
  DeviceRows queries(int64_t tokens, uint32_t seed) const {
    return {tokens, config().query_heads, config().head_dim, seed + step};
  }

  /** Work may still be under way when a call has thrown: the rows outlive it. */
  struct Wait {
    ~Wait() { cudaDeviceSynchronize(); }
  };

  void prefill(int64_t tokens) {
    const DeviceRows k = rows(tokens, 1000), v = rows(tokens, 2000);
    const Wait wait;
    cache.prefill(0, {sequence}, {tokens}, k.view(), v.view());
    ++step;
  }

  std::vector<float> decode() {
    const DeviceRows q = queries(1, 3000), k = rows(1, 4000), v = rows(1, 5000);
    const DeviceRows out = queries(1, 0);
    {
      const Wait wait;
      cache.decode(0, {sequence}, q.view(), k.view(), v.view(), out.view());
    }
    ++step;
    return out.download();
  }

  std::vector<float> attend() {
    const DeviceRows q = queries(3, 6000), out = queries(3, 0);
    const Wait wait;
    cache.attend(0, {sequence}, {3}, q.view(), out.view());
    return out.download();
  }

  Explanation explain() {
    const DeviceRows q = queries(1, 7000);
    TensorView view = q.view();
    view.rank = 2;
    view.shape = {q.host.heads, q.host.dim};
    view.strides = {q.host.dim, 1};
    const Wait wait;
    return cache.explain(0, sequence, view);
  }

  std::vector<float> read() {
    const int64_t total = cache.length(sequence);
    const DeviceRows k = rows(total, 0), v = rows(total, 0);
    {
      const Wait wait;
      cache.read(0, sequence, 0, k.view(), v.view());
    }
    std::vector<float> all = k.download();
    const std::vector<float> values = v.download();
    all.insert(all.end(), values.begin(), values.end());
    return all;
  }
};

enum class Kind { kMalloc, kHostAlloc, kCopy, kLaunch };
constexpr Kind kKinds[] = {Kind::kMalloc, Kind::kHostAlloc, Kind::kCopy, Kind::kLaunch};

inline const char* name_of_kind(Kind kind) {
  static const char* const names[] = {"cudaMalloc", "cudaHostAlloc", "copy", "launch"};
  return names[static_cast<int>(kind)];
}

/** Makes the Nth call of a kind fail, or all from the Nth on, as long as it lives. */
class Faults {
 public:
  Faults(Kind kind, int64_t nth, bool forever);
  ~Faults();
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  /** From now on nothing fails any more: what follows only tidies up. */
  static void lift();

  /** How many calls were refused. */
  int64_t refused() const;
};

}  // namespace pariskv::test
