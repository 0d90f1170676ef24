// Bytes from one memory to another by threads, for memory that the copy engines are slow with.
#include <cstdint>

#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using Piece = uint4;
constexpr int kThreads = 256;
constexpr int kInFlight = 8;  // loads of a thread before its first store

__global__ void __launch_bounds__(kThreads)
    copy_kernel(Piece* target, const Piece* source, int64_t pieces) {
  constexpr int64_t kStep = int64_t{kCopyBlocks} * kThreads;
  for (int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x; first < pieces;
       first += kInFlight * kStep) {
    Piece values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = first + i * kStep;
      if (at < pieces) values[i] = source[at];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = first + i * kStep;
      if (at < pieces) target[at] = values[i];
    }
  }
}

}  // namespace

void launch_copy(void* target, const void* source, int64_t bytes, cudaStream_t stream) {
  const int64_t pieces = bytes / int64_t(sizeof(Piece));
  if (pieces == 0) return;
  copy_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(static_cast<Piece*>(target),
                                                    static_cast<const Piece*>(source), pieces);
  check_launch("copy");
}

}  // namespace pariskv::cuda
