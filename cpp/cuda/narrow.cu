// Rows of a zone from plain ones to 8 bits and back, and copies of a tail: a warp has a row.
#include <algorithm>

#include "device/narrow_rows.cuh"
#include "device/warp.cuh"
#include "elements.h"
#include "kernels.h"
#include "row_type.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kWarpsOfBlock = kThreads / 32;
constexpr int kAtOnce = 4;  // neighbouring numbers of a lane: a word of narrow ones
constexpr int kTurns = int(kMaxHeadDim) / (32 * kAtOnce);  // of a lane, at most

/** As int8_scale and float_to_int8 (cpu/numerics.h), whose bits these are. */
__device__ __forceinline__ float narrow_scale(float largest, bool whole) {
  if (!whole) return float_of(0x7fc00000u);
  const float scale = __fdiv_rn(largest, float(kInt8Levels));
  return __fmul_rn(scale, float(kInt8Levels)) < infinity() ? scale : float_of(bits_of(scale) - 1);
}
__device__ __forceinline__ uint32_t narrow_number(float x, float scale) {
  const float level = rintf(__fdiv_rn(x, scale));
  return uint32_t(int(fminf(fmaxf(level, -float(kInt8Levels)), float(kInt8Levels)))) & 255;
}

/** A plain K or V becomes a narrow one. All lanes of a warp. */
template <typename Element>
__device__ __forceinline__ void narrow_half(const char* from, int dim, char* to) {
  float x[kTurns][kAtOnce];
  float largest = 0;
  bool whole = true;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int d = (32 * turn + lane_id()) * kAtOnce;
    if (d >= dim) break;
    RowReader<Element>::floats(RowReader<Element>::at(from, d), x[turn]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      whole = whole && finite(x[turn][i]);
      largest = fmaxf(largest, fabsf(x[turn][i]));
    }
  }
  const float scale = narrow_scale(warp_max(largest), __all_sync(~0u, whole));
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int d = (32 * turn + lane_id()) * kAtOnce;
    if (d >= dim) break;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (scale > 0) word |= narrow_number(x[turn][i], scale) << 8 * i;
    }
    *reinterpret_cast<uint32_t*>(to + d) = word;
  }
  if (lane_id() == 0) *reinterpret_cast<float*>(to + dim) = scale;
}

/** A plain row becomes a narrow one. All lanes of a warp. */
template <typename Element>
__device__ __forceinline__ void narrow_row(const ModelShape& shape, const char* from, char* to) {
  const int key_dim = int(shape.rows.key_dim);
  narrow_half<Element>(from, key_dim, to);
  narrow_half<Element>(from + RowReader<Element>::value_offset(key_dim), int(shape.rows.value_dim),
                       to + NarrowReader<Element>::value_offset(key_dim));
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) narrow_rows(NarrowCall call) {
  const ModelShape& shape = call.shape;
  const int64_t index = int64_t(blockIdx.x) * kWarpsOfBlock + warp_id();
  const int64_t position = call.begin + index / shape.kv_heads;
  if (position >= call.end) return;
  const int head = int(index % shape.kv_heads), tokens = int(shape.segment_tokens);
  const int64_t segment = position / tokens, slot = position - segment * tokens;
  const char* from = row_of_segment(static_cast<const char*>(call.sequence->rows[segment]), head,
                                    tokens, slot, shape.rows.bytes());
  char* to = row_of_segment(static_cast<char*>(call.sequence->narrow_rows[segment]), head, tokens,
                            slot, shape.narrow.bytes());
  narrow_row<Element>(shape, from, to);
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) copy_tail_rows(TailCopyCall call) {
  const ModelShape& shape = call.shape;
  const int64_t index = int64_t(blockIdx.x) * kWarpsOfBlock + warp_id();
  const int64_t i = call.from + index / shape.kv_heads, head = index % shape.kv_heads;
  if (i >= call.tail.count) return;
  const int64_t position = call.tail.position(i), tokens = shape.segment_tokens;
  const int64_t segment = position / tokens, bytes = shape.tail_rows().bytes();
  void* const* table = shape.narrows() ? call.sequence->narrow_rows : call.sequence->rows;
  const char* from = row_of_segment(static_cast<const char*>(table[segment]), int(head), tokens,
                                    position - segment * tokens, shape.zone_rows().bytes());
  char* to = call.sequence->tail_copies + (head * call.capacity + i) * bytes;
  if (!shape.narrows()) return narrow_row<Element>(shape, from, to);
  for (int64_t at = lane_id(); at < bytes / int64_t(sizeof(uint32_t)); at += 32) {
    reinterpret_cast<uint32_t*>(to)[at] = reinterpret_cast<const uint32_t*>(from)[at];
  }
}

/** A narrow K or V as elements. All lanes of a warp. */
template <typename Element>
__device__ __forceinline__ void widen_half(const char* from, int dim, Element* to) {
  const float scale = NarrowReader<Element>::scale(from, dim);
  for (int d = lane_id() * kAtOnce; d < dim; d += 32 * kAtOnce) {
    float x[kAtOnce];
    NarrowReader<Element>::floats(from + d, x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) to[d + i] = from_float<Element>(__fmul_rn(x[i], scale));
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) widen_rows(WidenCall call) {
  const ModelShape& shape = call.shape;
  const int64_t index = int64_t(blockIdx.x) * kWarpsOfBlock + warp_id();
  const int64_t i = index / shape.kv_heads;
  if (i >= call.tokens) return;
  const int head = int(index % shape.kv_heads);
  const char* from =
      row_of_segment(call.segment, head, shape.segment_tokens, call.slot + i, shape.narrow.bytes());
  const int key_dim = int(shape.rows.key_dim);
  const auto to = [&](const Rows& rows) {
    return reinterpret_cast<Element*>(rows.data) + i * rows.stride_i + head * rows.stride_j;
  };
  widen_half(from, key_dim, to(call.k));
  widen_half(from + NarrowReader<Element>::value_offset(key_dim), int(shape.rows.value_dim),
             to(call.v));
}

unsigned blocks_of(int64_t rows) { return unsigned((rows + kWarpsOfBlock - 1) / kWarpsOfBlock); }

}  // namespace

void launch_narrow(const NarrowCall& call, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const unsigned blocks = blocks_of((call.end - call.begin) * call.shape.kv_heads);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    narrow_rows<Element><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("rows to 8 bits");
}

void launch_copy_tail(const TailCopyCall& call, cudaStream_t stream) {
  const unsigned blocks = blocks_of((call.tail.count - call.from) * call.shape.kv_heads);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    copy_tail_rows<Element><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("copy the tail");
}

void launch_widen(const WidenCall& call, cudaStream_t stream) {
  if (call.tokens <= 0) return;
  const unsigned blocks = blocks_of(call.tokens * call.shape.kv_heads);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    widen_rows<Element><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("rows from 8 bits");
}

}  // namespace pariskv::cuda
