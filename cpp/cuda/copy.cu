// Bytes from one memory to another by threads, for memory that the copy engines are slow with.
#include <cstdint>

#include "device/stored_rows.cuh"
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

/** A block of threads: one row, of one head. Narrow rows are whole words, no more. */
__global__ void __launch_bounds__(kThreads) copy_tail_rows(TailCopyCall call) {
  const ModelShape& shape = call.shape;
  const int64_t i = call.from + blockIdx.x, head = blockIdx.y;
  const int64_t bytes = shape.zone_rows().bytes(), tokens = shape.segment_tokens;
  const int64_t position = call.tail.position(i), segment = position / tokens;
  void* const* table = shape.narrows() ? call.sequence->narrow_rows : call.sequence->rows;
  const char* from = device::row_of_segment(static_cast<const char*>(table[segment]), int(head),
                                            tokens, position - segment * tokens, bytes);
  char* to = call.sequence->tail_copies + (head * call.capacity + i) * bytes;
  for (int64_t at = threadIdx.x; at < bytes / int64_t(sizeof(uint32_t)); at += kThreads) {
    reinterpret_cast<uint32_t*>(to)[at] = reinterpret_cast<const uint32_t*>(from)[at];
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

void launch_copy_tail(const TailCopyCall& call, cudaStream_t stream) {
  const dim3 grid(unsigned(call.tail.count - call.from), unsigned(call.shape.kv_heads));
  copy_tail_rows<<<grid, kThreads, 0, stream>>>(call);
  check_launch("copy the tail");
}

}  // namespace pariskv::cuda
