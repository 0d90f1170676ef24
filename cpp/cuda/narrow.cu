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

/** Numbers as they are. */
struct AsTheyAre {
  __device__ __forceinline__ float operator()(float x, int) const { return x; }
};

/** Numbers less the common part of a tail's rows. */
struct WithoutCommon {
  const float* centre;
  const float* unit;

  __device__ __forceinline__ float operator()(float x, int d) const {
    if (!finite(x)) return x;
    return held(__fmul_rn(held(__fsub_rn(x, centre[d])), __fdiv_rn(1.0f, unit[d])));
  }
  static __device__ __forceinline__ float held(float x) {
    return fminf(fmaxf(x, -kMostApart), kMostApart);
  }
};

/**
 * A plain K or V becomes a narrow one. All lanes of a warp.
 * @param left  left(x, d): the number to write for number d
 */
template <typename Element, typename Left>
__device__ __forceinline__ void narrow_half(const char* from, int dim, const Left& left, char* to) {
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
      x[turn][i] = left(x[turn][i], d + i);
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
template <typename Element, typename Left>
__device__ __forceinline__ void narrow_row(const ModelShape& shape, const char* from,
                                           const Left& key, const Left& value, char* to) {
  const int key_dim = int(shape.rows.key_dim);
  narrow_half<Element>(from, key_dim, key, to);
  narrow_half<Element>(from + RowReader<Element>::value_offset(key_dim), int(shape.rows.value_dim),
                       value, to + NarrowReader<Element>::value_offset(key_dim));
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
  narrow_row<Element>(shape, from, AsTheyAre{}, AsTheyAre{}, to);
}

constexpr int kCommonThreads = 32 * kCommonStrands;  // a warp has a strand
constexpr int kCommonChannels = 32 * kAtOnce;        // that are summed at a time

/** Sums over a strand, channel by channel. */
struct StrandSums {
  double sums[kCommonStrands][kCommonChannels];
};

/**
 * The common part of a tail's rows, from the first of them: a block for K or V of a head. Of
 * channels that are summed at a time each strand leaves its sums, then sums of squares, then
 * counts.
 */
template <typename Element>
__global__ void __launch_bounds__(kCommonThreads) set_common(TailCopyCall call, int64_t count) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& strands = *reinterpret_cast<StrandSums*>(shared);
  __shared__ uint8_t loud[kMostCommonRows];
  __shared__ int rows_as_loud[256];
  __shared__ int median_row;
  __shared__ int exponents[kMaxHeadDim];
  __shared__ int median;
  __shared__ int largest;
  const ModelShape& shape = call.shape;
  const int head = int(blockIdx.x) / 2, warp = warp_id(), thread = int(threadIdx.x);
  const bool of_values = blockIdx.x % 2 == 1;
  const int dim = int(of_values ? shape.rows.value_dim : shape.rows.key_dim);
  const int half = of_values ? RowReader<Element>::value_offset(int(shape.rows.key_dim)) : 0;
  const int64_t tokens = shape.segment_tokens;
  const TailCopies copies = shape.tail_copies(Tail::capacity(call.tail_rows));
  char* const block = call.sequence->tail_copies;
  const CommonPart common = of_values ? copies.of_values(block, head) : copies.of_keys(block, head);
  const auto half_of = [&](int64_t i) {
    const int64_t position = call.tail.position(i), segment = position / tokens;
    const char* row = row_of_segment(static_cast<const char*>(call.sequence->rows[segment]), head,
                                     tokens, position - segment * tokens, shape.rows.bytes());
    return row + half;
  };
  for (int i = thread; i < 256; i += kCommonThreads) rows_as_loud[i] = 0;
  __syncthreads();
  for (int64_t i = warp; i < count; i += kCommonStrands) {
    const char* row = half_of(i);
    float largest = 0;
    for (int d = kAtOnce * lane_id(); d < dim; d += kCommonChannels) {
      float x[kAtOnce];
      RowReader<Element>::floats(RowReader<Element>::at(row, d), x);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (finite(x[c])) largest = fmaxf(largest, fabsf(x[c]));
      }
    }
    const int loudness = loudness_of(bits_of(warp_max(largest)));
    if (lane_id() == 0) {
      loud[i] = uint8_t(loudness);
      atomicAdd(&rows_as_loud[loudness], 1);
    }
  }
  __syncthreads();
  if (thread == 0) {
    int64_t below = 0;
    median_row = 0;
    for (int i = 0; i < 256; ++i) {
      below += rows_as_loud[i];
      if (below > count / 2) {
        median_row = i;
        break;
      }
    }
  }
  __syncthreads();
  for (int first = 0; first < dim; first += kCommonChannels) {
    const int own = first + kAtOnce * lane_id();
    double sums[kAtOnce] = {}, squares[kAtOnce] = {}, counts[kAtOnce] = {};
#pragma unroll 4
    for (int64_t i = warp; i < count; i += kCommonStrands) {
      if (own >= dim || !is_common(loud[i], median_row)) continue;
      float x[kAtOnce];
      RowReader<Element>::floats(RowReader<Element>::at(half_of(i), own), x);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (!finite(x[c])) continue;
        sums[c] = __dadd_rn(sums[c], double(x[c]));
        squares[c] = __dadd_rn(squares[c], __dmul_rn(double(x[c]), double(x[c])));
        counts[c] = counts[c] + 1;
      }
    }
    // All strands of a channel, in their order: by the thread that has it.
    const auto added = [&](const double (&of_lane)[kAtOnce]) {
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) strands.sums[warp][kAtOnce * lane_id() + c] = of_lane[c];
      __syncthreads();
      double sum = 0;
      if (thread < kCommonChannels) {
        for (int s = 0; s < kCommonStrands; ++s) sum = __dadd_rn(sum, strands.sums[s][thread]);
      }
      __syncthreads();
      return sum;
    };
    const double sum = added(sums), square = added(squares), rows = added(counts);
    if (thread >= kCommonChannels || first + thread >= dim) continue;
    const double number = rows > 1 ? rows : 1.0, mean = __ddiv_rn(sum, number);
    common.centre[first + thread] = float(mean);
    const double variance = __dsub_rn(__ddiv_rn(square, number), __dmul_rn(mean, mean));
    exponents[first + thread] =
        exponent_of_root(uint64_t(__double_as_longlong(variance > 0 ? variance : 0.0)));
  }
  __syncthreads();
  // By rank: ties count by their order.
  for (int c = thread; c < dim; c += kCommonThreads) {
    int rank = 0;
    for (int o = 0; o < dim; ++o) {
      rank += exponents[o] < exponents[c] || (exponents[o] == exponents[c] && o < c);
    }
    if (rank == dim / 2) median = exponents[c];
    if (rank == dim - 1) largest = exponents[c];
  }
  __syncthreads();
  for (int c = thread; c < dim; c += kCommonThreads) {
    common.unit[c] = ldexpf(1.0f, exponent_of_unit(exponents[c], median, largest));
  }
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
  const TailCopies copies = shape.tail_copies(Tail::capacity(call.tail_rows));
  char* const block = call.sequence->tail_copies;
  char* to = block + copies.row_offset(head, i);
  if (copies.centred) {
    const CommonPart keys = copies.of_keys(block, head), values = copies.of_values(block, head);
    return narrow_row<Element>(shape, from, WithoutCommon{keys.centre, keys.unit},
                               WithoutCommon{values.centre, values.unit}, to);
  }
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
  const bool sets_common = call.from == 0 && !call.shape.narrows();
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    if (sets_common) {
      const int64_t rows = common_rows(call.tail.count, call.tail_rows);
      const auto halves = unsigned(2 * call.shape.kv_heads);
      constexpr size_t kBytes = sizeof(StrandSums);
      set_common<Element><<<halves, kCommonThreads, kBytes, stream>>>(call, rows);
    }
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
