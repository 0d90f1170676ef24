/** What the programs share: memory, and times in caches as a layer of a model finds them. */
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime.h"

namespace pariskv::cuda {

/** Memory that is there until the program ends, zeros at first. */
template <typename T>
T* device_memory(int64_t count) {
  void* data = nullptr;
  check(cudaMalloc(&data, size_t(count) * sizeof(T)), "cudaMalloc");
  check(cudaMemset(data, 0, size_t(count) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(data);
}

template <typename T>
T* on_device(const std::vector<T>& host) {
  T* data = device_memory<T>(int64_t(host.size()));
  check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return data;
}

/**
 * Fills the level-2 cache with lines that have been read, as the weights of a model are: what was
 * written alone would have to go to memory while something is timed. It also takes so long that
 * the host is ahead of the device afterwards.
 */
class ColdCache {
 public:
  ColdCache();
  void flush(cudaStream_t stream);

 private:
  uint4* lines_;
  uint32_t* seen_;
  int turn_ = 0;
};

class Clock {
 public:
  explicit Clock(int rounds);

  /** The median of some runs in microseconds; with `cold` the cache is full of something else. */
  double median(cudaStream_t stream, bool cold, const std::function<void()>& before,
                const std::function<void()>& run);

 private:
  const int rounds_;
  ColdCache cache_;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
};

/** Times digests and choices of PRKV; rows lie in segments of 1,024 tokens, near and far. */
void time_pages(Clock& clock, const std::vector<void*>& near, const std::vector<void*>& far,
                cudaStream_t stream);

/** What main returns: of run(rounds), where the first argument may say how many rounds. */
int run_program(int count, char** arguments, void (*run)(int rounds));

}  // namespace pariskv::cuda
