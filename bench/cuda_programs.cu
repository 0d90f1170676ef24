#include "cuda_programs.h"

namespace pariskv::cuda {

namespace {

constexpr int64_t kBytes = int64_t{1} << 30;  // far more than any such cache
constexpr int64_t kLines = kBytes / int64_t(sizeof(uint4));

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

}  // namespace pariskv::cuda
