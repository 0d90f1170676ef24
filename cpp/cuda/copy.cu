// Bytes that threads copy, from memory that the copy engines are slow with, and that they zero, of
// many blocks at once.
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using Piece = uint4;
constexpr int kThreads = 256;
constexpr int kInFlight = 8;  // loads of a thread before its first store

/** Blocks of memory that a launch copies one after the other. */
struct CopyParameters {
  static constexpr int kMost = 160;
  int count;
  RowCopy copy[kMost];
};
static_assert(sizeof(CopyParameters) <= 4096);

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyParameters p) {
  constexpr int64_t kStep = int64_t{kCopyBlocks} * kThreads;
  for (int own = 0; own < p.count; ++own) {
    auto* const target = static_cast<Piece*>(p.copy[own].target);
    const auto* const source = static_cast<const Piece*>(p.copy[own].source);
    const int64_t pieces = p.copy[own].bytes / int64_t(sizeof(Piece));
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
}

/** Blocks of memory, of which a launch of few carries few. */
template <int kMost>
struct ClearParameters {
  Cleared block[kMost];
};
constexpr int kFewCleared = 120;
static_assert(sizeof(ClearParameters<kMostCleared>) <= 32764, "all that a launch may carry");

template <int kMost>
__global__ void __launch_bounds__(kThreads)
    clear_blocks(const __grid_constant__ ClearParameters<kMost> p) {
  const Cleared& own = p.block[blockIdx.y];
  auto* const pieces = static_cast<Piece*>(own.data);
  const int64_t count = own.bytes / int64_t(sizeof(Piece)), step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    pieces[i] = {0, 0, 0, 0};
  }
}

template <int kMost>
void launch_clear_of(const Cleared* blocks, int64_t count, cudaStream_t stream) {
  constexpr int64_t kShare = int64_t{1} << 16;  // bytes of a memory block for a block of threads
  ClearParameters<kMost> p;
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    p.block[i] = blocks[i];
    most = std::max(most, blocks[i].bytes);
  }
  const unsigned shares = unsigned(std::clamp<int64_t>(most / kShare, 1, 64));
  clear_blocks<<<dim3(shares, unsigned(count)), kThreads, 0, stream>>>(p);
  check_launch("zero memory");
}

}  // namespace

void launch_clear(const Cleared* blocks, int64_t count, cudaStream_t stream) {
  if (count <= kFewCleared) return launch_clear_of<kFewCleared>(blocks, count, stream);
  launch_clear_of<int(kMostCleared)>(blocks, count, stream);
}

void launch_copies(const RowCopy* copies, int64_t count, cudaStream_t stream) {
  CopyParameters p;
  for (int64_t first = 0; first < count; first += p.count) {
    p.count = int(std::min<int64_t>(count - first, p.kMost));
    std::copy_n(copies + first, p.count, p.copy);
    copy_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(p);
    check_launch("copy");
  }
}

}  // namespace pariskv::cuda
