#include "cuda_programs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace pariskv::cuda {

namespace {

constexpr int64_t kBytes = int64_t{1} << 30;  // far more than any such cache
constexpr int64_t kLines = kBytes / int64_t(sizeof(uint4));

constexpr int kWarmUp = 3;
constexpr int kRounds = 30;

__global__ void read_all(const uint4* lines, uint32_t* seen) {
  uint32_t sum = 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < kLines; i += step) {
    const uint4 line = lines[i];
    sum += line.x ^ line.y ^ line.z ^ line.w;
  }
  if (sum == 1) *seen = sum;  // or nobody would need to read
}

}  // namespace

ColdCache::ColdCache() : lines_(device_memory<uint4>(kLines)), seen_(device_memory<uint32_t>(1)) {}

void ColdCache::flush(cudaStream_t stream) {
  check(cudaMemsetAsync(lines_, ++turn_, kBytes, stream), "fill");
  read_all<<<1024, 512, 0, stream>>>(lines_, seen_);
  check_launch("fill");
}

Clock::Clock(int rounds) : rounds_(rounds) {
  check(cudaEventCreate(&start_), "event");
  check(cudaEventCreate(&end_), "event");
}

double Clock::median(cudaStream_t stream, bool cold, const std::function<void()>& before,
                     const std::function<void()>& run) {
  std::vector<double> taken;
  for (int turn = 0; turn < kWarmUp + rounds_; ++turn) {
    before();
    if (cold) {
      cache_.flush(stream);
    } else {
      check(cudaStreamSynchronize(stream), "wait");
      run();  // brings what it reads into the cache
    }
    check(cudaEventRecord(start_, stream), "event");
    run();
    check(cudaEventRecord(end_, stream), "event");
    check(cudaEventSynchronize(end_), "wait");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start_, end_), "event");
    if (turn >= kWarmUp) taken.push_back(1e3 * double(milliseconds));
  }
  std::sort(taken.begin(), taken.end());
  return taken[taken.size() / 2];
}

int run_program(int count, char** arguments, void (*run)(int rounds)) {
  try {
    run(count > 1 ? std::max(1, std::atoi(arguments[1])) : kRounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace pariskv::cuda
