// Copies of a tail's rows in 8 bits, and what rows in 8 bits have in common (tail_copies.h,
// narrow.h).
#include <algorithm>

#include "elements.h"
#include "kernels.h"
#include "runtime.h"
#include "zone_row.cuh"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr int kCommonThreads = 32 * kCommonStrands;  // a warp has a strand
constexpr int kCommonChannels = 32 * kAtOnce;        // that are summed at a time

/** Sums over a strand, channel by channel. */
struct StrandSums {
  double sums[kCommonStrands][kCommonChannels];
};

/** Which rows have a common part, and where it goes. */
struct CommonCall {
  ModelShape shape;
  const SequenceView* sequence;
  void* state;
  Tail tail;          // of which the first `count` rows; K and V of heads take turns
  int64_t tail_rows;  // of the policy
  int64_t begin;      // not negative: V alone of plain rows from this position on, for narrow ones
  int64_t count;

  __device__ __forceinline__ bool of_tail() const { return begin < 0; }
};

/** That of a head. */
__device__ __forceinline__ CommonPart common_of(const CommonCall& call, int head, bool of_values) {
  const ModelShape& shape = call.shape;
  if (!call.of_tail()) {
    const NarrowLayout& layout = shape.narrow_base;
    char* const state = static_cast<char*>(call.state);
    if (head == 0 && threadIdx.x == 0) *reinterpret_cast<int32_t*>(state + layout.based) = 1;
    return NarrowBase::values_of(layout, state, head);
  }
  const TailCopies copies = shape.tail_copies(Tail::capacity(call.tail_rows));
  char* const block = (*call.sequence)[Part::kTailCopies];
  return of_values ? copies.of_values(block, head) : copies.of_keys(block, head);
}

/**
 * The common part of some rows: a block for K or V of a head. Of channels that are summed at a time
 * each strand leaves its sums, then sums of squares, then counts.
 */
template <typename Element>
__global__ void __launch_bounds__(kCommonThreads) set_common(CommonCall call) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& strands = *reinterpret_cast<StrandSums*>(shared);
  __shared__ uint8_t loud[kMostCommonRows];
  __shared__ int rows_as_loud[256];
  __shared__ int median_row;
  __shared__ int exponents[kMaxHeadDim];
  __shared__ int median;
  __shared__ int largest;
  const ModelShape& shape = call.shape;
  const bool of_tail = call.of_tail();
  const int head = of_tail ? int(blockIdx.x) / 2 : int(blockIdx.x);
  const int warp = warp_id(), thread = int(threadIdx.x);
  const bool of_values = !of_tail || blockIdx.x % 2 == 1;
  const int dim = int(of_values ? shape.rows.value_dim : shape.rows.key_dim);
  const int64_t count = call.count;
  const CommonPart common = common_of(call, head, of_values);
  const HeadRows<Element> rows(shape, *call.sequence, call.state, head, of_tail && shape.narrows());
  const auto row_of = [&](int64_t i) {
    return rows.row(of_tail ? call.tail.position(i) : call.begin + i);
  };
  const auto read = [&](const auto& row, int d, float (&x)[kAtOnce]) {
    if (of_values) return rows.value(row, d, x);
    rows.key(row, d, x);
  };
  for (int i = thread; i < 256; i += kCommonThreads) rows_as_loud[i] = 0;
  __syncthreads();
  constexpr int kAhead = 4;  // rows of a warp on their way
  for (int64_t first = warp; first < count; first += kAhead * kCommonStrands) {
    float largest[kAhead] = {};
    for (int d = kAtOnce * lane_id(); d < dim; d += kCommonChannels) {
      float x[kAhead][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t own = first + i * kCommonStrands;
        read(row_of(own < count ? own : count - 1), d, x[i]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          if (finite(x[i][c])) largest[i] = fmaxf(largest[i], fabsf(x[i][c]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t own = first + i * kCommonStrands;
      const int loudness = loudness_of(bits_of(warp_max(largest[i])));
      if (lane_id() != 0 || own >= count) continue;
      loud[own] = uint8_t(loudness);
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
    double sums[kAtOnce] = {}, squares[kAtOnce] = {};
    int counts[kAtOnce] = {};
    for (int64_t begin = warp; own < dim && begin < count; begin += kAhead * kCommonStrands) {
      float x[kAhead][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = begin + i * kCommonStrands;
        read(row_of(at < count ? at : count - 1), own, x[i]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = begin + i * kCommonStrands;
        if (at >= count || !is_common(loud[at], median_row)) continue;
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          if (!finite(x[i][c])) continue;
          sums[c] = __dadd_rn(sums[c], double(x[i][c]));
          squares[c] = __dadd_rn(squares[c], __dmul_rn(double(x[i][c]), double(x[i][c])));
          ++counts[c];
        }
      }
    }
    // All strands of a channel, in their order: by the thread that has it.
    const auto added = [&](const auto& of_lane) {
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        strands.sums[warp][kAtOnce * lane_id() + c] = double(of_lane[c]);
      }
      __syncthreads();
      double sum = 0;
      if (thread < kCommonChannels) {
        for (int s = 0; s < kCommonStrands; ++s) sum = __dadd_rn(sum, strands.sums[s][thread]);
      }
      __syncthreads();
      return sum;
    };
    const double sum = added(sums), square = added(squares), counted = added(counts);
    if (thread >= kCommonChannels || first + thread >= dim) continue;
    const double number = counted > 1 ? counted : 1.0, mean = __ddiv_rn(sum, number);
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
void launch_common(const CommonCall& call, unsigned blocks, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(StrandSums);
  set_common<Element><<<blocks, kCommonThreads, kBytes, stream>>>(call);
}

constexpr int kThreads = 256;
constexpr int kWarpsOfBlock = kThreads / 32;

/** A warp has a row. */
template <typename Element>
__global__ void __launch_bounds__(kThreads) copy_tail_rows(TailCopyCall call) {
  const ModelShape& shape = call.shape;
  const int64_t index = int64_t(blockIdx.x) * kWarpsOfBlock + warp_id();
  const int64_t i = call.from + index / shape.kv_heads;
  if (i >= call.tail.count) return;
  const int head = int(index % shape.kv_heads);
  const HeadRows<Element> rows(shape, *call.sequence, call.state, head, shape.narrows());
  const auto row = rows.row(call.tail.position(i));
  const TailCopies copies = shape.tail_copies(Tail::capacity(call.tail_rows));
  char* const block = (*call.sequence)[Part::kTailCopies];
  char* const to = block + copies.row_offset(head, i);
  const auto write = [&](int dim, const CommonPart& common, char* half, const auto& read) {
    LaneWords words;
    each_word(dim, words, [&](int d, float (&x)[kAtOnce]) {
      read(d, x);
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        x[e] = without_common(x[e], common.centre[d + e], common.unit[d + e]);
      }
    });
    write_narrow(dim, words, false, half);
  };
  const int key_dim = int(shape.rows.key_dim), value_dim = int(shape.rows.value_dim);
  write(key_dim, copies.of_keys(block, head), to,
        [&](int d, float (&x)[kAtOnce]) { rows.key(row, d, x); });
  write(value_dim, copies.of_values(block, head), to + NarrowReader<Element>::value_offset(key_dim),
        [&](int d, float (&x)[kAtOnce]) { rows.value(row, d, x); });
}

}  // namespace

void launch_copy_tail(const TailCopyCall& call, cudaStream_t stream) {
  const int64_t heads = call.shape.kv_heads, rows = (call.tail.count - call.from) * heads;
  const auto blocks = unsigned((rows + kWarpsOfBlock - 1) / kWarpsOfBlock);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    if (call.from == 0) {
      launch_common<Element>({call.shape, call.sequence, call.state, call.tail, call.tail_rows, -1,
                              common_rows(call.tail.count, call.tail_rows)},
                             unsigned(2 * heads), stream);
    }
    copy_tail_rows<Element><<<blocks, kThreads, 0, stream>>>(call);
  });
  check_launch("copy the tail");
}

void launch_narrow_base(const EncodeCall& call, void* state, cudaStream_t stream) {
  const int64_t rows = std::min(call.opening - call.begin, kMostValueRows);
  dispatch_element(call.shape.dtype, [&](auto element) {
    launch_common<decltype(element)>(
        {call.shape, call.sequence, state, Tail{}, 0, call.begin, rows},
        unsigned(call.shape.kv_heads), stream);
  });
  check_launch("what rows have in common");
}

}  // namespace pariskv::cuda
