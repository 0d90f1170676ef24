// The common part of keys is taken off before they are encoded: the balance of channels, and a
// mean per block of neighbours. The same sums, in the same order, as cpu/pariskv/block_means.cpp: a
// thread has a channel.
#include "policy/pariskv/codec/block_means.h"

#include "device/stored_rows.cuh"
#include "device/warp.cuh"
#include "dispatch.h"
#include "elements.h"
#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr int kMostBlock = 256;  // keys that share a mean
constexpr int kMostThreads = int(kMaxRotatedDim);
constexpr int kAhead = 8;  // elements that a thread has on their way

struct MeanParameters {
  const SequenceView* sequence;
  Balance balance;
  SummaryLayout layout;
  int32_t begin, end;
  int32_t opening;
  int32_t query_windows;
  int32_t dim;  // channels
  int32_t row_bytes;
};

/** Some neighbouring keys of one head, which lie in one segment. */
template <typename Element>
struct Keys {
  const char* rows;
  int row_bytes, dim, count;

  __device__ __forceinline__ Keys(const MeanParameters& p, int head, int begin, int end)
      : row_bytes(p.row_bytes), dim(p.dim), count(end - begin) {
    const int tokens = int(p.layout.tokens), segment = begin / tokens;
    rows = row_of_segment(static_cast<const char*>(p.sequence->rows[segment]), head, tokens,
                          begin - segment * tokens, row_bytes);
  }
  __device__ __forceinline__ float number(int key, int channel) const {
    return RowReader<Element>::number(rows + int64_t(key) * row_bytes, channel, dim);
  }
};

/** Which keys of a block are finite, a bit each. */
struct FiniteKeys {
  uint32_t words[kMostBlock / 32];
  int count;

  /** All threads; has barriers before and after. */
  template <typename Element>
  __device__ __forceinline__ void find(const Keys<Element>& keys) {
    __syncthreads();
    if (threadIdx.x < kMostBlock / 32) words[threadIdx.x] = 0;
    __syncthreads();
    for (int key = warp_id(); key < keys.count; key += int(blockDim.x) / 32) {
      bool whole = true;
      for (int c = lane_id(); c < keys.dim; c += 32) whole = whole && finite(keys.number(key, c));
      whole = __all_sync(~0u, whole);
      if (whole && lane_id() == 0) atomicOr(&words[key / 32], 1u << key % 32);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      count = 0;
      for (const uint32_t word : words) count += __popc(word);
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool has(int key) const { return words[key / 32] >> key % 32 & 1; }
};

/** Calls visit(x) for the channel of every finite key, in order; some are read ahead. */
template <typename Element, typename Visit>
__device__ __forceinline__ void each_finite(const Keys<Element>& keys, const FiniteKeys& finite,
                                            int channel, Visit visit) {
  for (int first = 0; first < keys.count; first += kAhead) {
    float x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      x[i] = first + i < keys.count ? keys.number(first + i, channel) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < keys.count && finite.has(first + i)) visit(x[i]);
    }
  }
}

/** The mean of one channel; 0 where no key is finite. */
template <typename Element>
__device__ __forceinline__ double mean_of(const Keys<Element>& keys, const FiniteKeys& finite,
                                          int channel) {
  double sum = 0;
  each_finite(keys, finite, channel, [&](float x) { sum = __dadd_rn(sum, double(x)); });
  return finite.count > 0 ? __ddiv_rn(sum, double(finite.count)) : 0.0;
}

/** The largest of all threads' numbers, none of them negative. All threads; ends with a barrier. */
__device__ __forceinline__ double largest_of_block(double x, double* room) {
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, step));
  if (lane_id() == 0) room[warp_id()] = x;
  __syncthreads();
  for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) x = fmax(x, room[warp]);
  __syncthreads();
  return x;
}

/** A block of threads: the mean of a block of keys, of one head. */
template <typename Element>
__global__ void __launch_bounds__(kMostThreads) store_means(MeanParameters p) {
  __shared__ FiniteKeys finite;
  __shared__ double room[kMostThreads / 32];
  const int head = int(blockIdx.y), size = int(p.layout.block);
  const int number = p.begin / size + int(blockIdx.x);
  const int begin = max(number * size, p.begin), end = min((number + 1) * size, p.end);
  const Keys<Element> keys(p, head, begin, end);
  finite.find(keys);
  const int c = int(threadIdx.x);
  double mean = 0;
  if (c < p.dim && finite.count > 0) {
    const int at = head * p.dim + c;
    mean = __dmul_rn(mean_of(keys, finite, c), double(p.balance.gain[at]));
    const double centre =
        __dmul_rn(double(p.balance.centre[at]), double(p.balance.centre_step[head]));
    mean = __dsub_rn(mean, centre);
  }
  // As mean_step and mean_level.
  const double most = __ddiv_rn(largest_of_block(fabs(mean), room), double(kMeanLevels));
  const float step = float(most < 0x1p121 ? most : 0x1p121);
  double level = step == 0 ? 0.0 : rint(__ddiv_rn(mean, double(step)));
  level = fmin(fmax(level, -double(kMeanLevels)), double(kMeanLevels));
  const int segment = begin / int(p.layout.tokens);
  uint8_t* block = p.sequence->summaries[segment];
  const int own = number - segment * int(p.layout.tokens / size);
  reinterpret_cast<int8_t*>(block + p.layout.means_at(head, own))[c] = int8_t(int(level));
  if (c == 0) *reinterpret_cast<float*>(block + p.layout.steps_at(head, own)) = step;
}

/** Mean squares of channels, with a floor; false: they say nothing. As lift_quiet. All threads. */
__device__ __forceinline__ bool lift_quiet(double& square, bool there, double* room) {
  const bool whole = !there || fabs(square) < double(infinity());
  if (__syncthreads_or(!whole)) return false;
  const double largest = largest_of_block(there ? square : 0.0, room);
  if (!(largest > 0)) return false;
  const double floor = __dmul_rn(largest, kQuietest);
  if (square < floor) square = floor;
  return true;
}

/** The centre of a head, from the mean of each channel, balanced. All threads. */
__device__ __forceinline__ void store_centre(const MeanParameters& p, int head, double mean,
                                             double* room) {
  const int c = int(threadIdx.x);
  const double most = __ddiv_rn(largest_of_block(fabs(mean), room), double(kFineLevels));
  const float step = float(most < 0x1p114 ? most : 0x1p114);  // as centre_step and centre_level
  double level = step == 0 ? 0.0 : rint(__ddiv_rn(mean, double(step)));
  level = fmin(fmax(level, -double(kFineLevels)), double(kFineLevels));
  if (c < p.dim) p.balance.centre[head * p.dim + c] = int16_t(int(level));
  if (c == 0) p.balance.centre_step[head] = step;
}

/**
 * Sums of a block of keys of one head that set its balance, where the block's records will be: they
 * are written after the balance, and are longer.
 */
struct BlockSums {
  double* left;    // (dim) squares of what keys have beside their mean
  double* centre;  // (dim) keys
  double* count;   // finite keys

  __device__ __forceinline__ BlockSums(const MeanParameters& p, int head, int number) {
    const int tokens = int(p.layout.tokens), begin = number * int(p.layout.block);
    uint8_t* const segment = p.sequence->summaries[begin / tokens];
    left = reinterpret_cast<double*>(segment + p.layout.records_at(head, begin % tokens));
    centre = left + p.dim;
    count = centre + p.dim;
  }
};

/** A block of threads: the sums of a block of keys, of one head. */
template <typename Element>
__global__ void __launch_bounds__(kMostThreads) sum_opening(MeanParameters p) {
  __shared__ FiniteKeys finite;
  const int head = int(blockIdx.y), size = int(p.layout.block), c = int(threadIdx.x);
  const int number = p.begin / size + int(blockIdx.x);
  const Keys<Element> keys(p, head, max(number * size, p.begin), (number + 1) * size);
  finite.find(keys);
  const BlockSums sums(p, head, number);
  if (c == 0) *sums.count = double(finite.count);
  if (c >= p.dim) return;
  const double mean = mean_of(keys, finite, c);
  double own = 0, centre = 0;
  each_finite(keys, finite, c, [&](float x) {
    const double left = __dsub_rn(double(x), mean);
    own = __fma_rn(left, left, own);
    centre = __dadd_rn(centre, double(x));
  });
  sums.left[c] = own;
  sums.centre[c] = centre;
}

/** A block of threads: the balance of one head, from the sums of its blocks. As set_stretch. */
__global__ void __launch_bounds__(kMostThreads) set_balance(MeanParameters p) {
  __shared__ double room[kMostThreads / 32];
  __shared__ double shared[kMostThreads];
  __shared__ double median;
  const int head = int(blockIdx.x), size = int(p.layout.block), c = int(threadIdx.x);
  const bool there = c < p.dim;
  double own = 0, centre = 0, count = 0;
  const int last = (p.opening - 1) / size;
  for (int first = p.begin / size; first <= last; first += kAhead) {
    double added[3][kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const BlockSums sums(p, head, min(first + i, last));
      added[0][i] = there ? sums.left[c] : 0.0;
      added[1][i] = there ? sums.centre[c] : 0.0;
      added[2][i] = *sums.count;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i > last) continue;
      own = __dadd_rn(own, added[0][i]);
      centre = __dadd_rn(centre, added[1][i]);
      count += added[2][i];
    }
  }
  if (count > 0) own = __ddiv_rn(own, count);
  // Half a head apart are channels that a rotation of positions may turn into one another.
  const auto paired = [&](double x) {
    __syncthreads();
    shared[c] = x;
    __syncthreads();
    return there ? __dadd_rn(x, shared[(c + p.dim / 2) % p.dim]) : 0.0;
  };
  double square = paired(own);
  double query = 0;
  for (int w = 0; there && w < p.query_windows; ++w) {
    const int64_t window = int64_t(w) * p.layout.kv_heads + head;
    query = __dadd_rn(query, double(p.balance.query_squares[window * p.dim + c]));
  }
  query = paired(query);
  float* stretch = p.balance.stretch + head * p.dim;
  float* gain = p.balance.gain + head * p.dim;
  centre = there && count > 0 ? __ddiv_rn(centre, count) : 0.0;
  if (!lift_quiet(square, there, room)) {
    if (there) stretch[c] = gain[c] = 1.0f;
    store_centre(p, head, centre, room);
    return;
  }
  const bool has_queries = p.query_windows > 0 && lift_quiet(query, there, room);
  double raw;
  if (has_queries && query > 0) {
    raw = __dsqrt_rn(__dsqrt_rn(__ddiv_rn(square, query)));
  } else {
    const double root = __dsqrt_rn(__dsqrt_rn(square));
    raw = __dmul_rn(root, __dsqrt_rn(root));
  }
  shared[c] = raw;
  __syncthreads();
  if (there) {
    int rank = 0;
    for (int o = 0; o < p.dim; ++o) rank += shared[o] < raw || (shared[o] == raw && o < c);
    if (rank == p.dim / 2) median = raw;
  }
  __syncthreads();
  const double ratio = __ddiv_rn(raw, median);
  const float factor = float(ratio < kLeastStretch  ? kLeastStretch
                             : ratio > kMostStretch ? kMostStretch
                                                    : ratio);
  const float inverse = __fdiv_rn(1.0f, factor);
  if (there) stretch[c] = factor, gain[c] = inverse;
  store_centre(p, head, there ? __dmul_rn(centre, double(inverse)) : 0.0, room);
}

/** A block of threads: squares of the queries of one head. */
template <typename Element>
__global__ void __launch_bounds__(kMostThreads) observe_queries(ObserveCall call) {
  const int head = int(blockIdx.x), c = int(threadIdx.x);
  const int dim = int(call.shape.rows.key_dim), group = int(call.shape.group);
  if (c >= dim) return;
  float* square = call.squares + head * dim + c;
  float sum = call.first ? 0.0f : *square;
  for (int64_t i = 0; i < call.positions; ++i) {
    for (int g = 0; g < group; ++g) {
      const auto* row = reinterpret_cast<const Element*>(call.q.data) + i * call.q.stride_i +
                        (int64_t(head) * group + g) * call.q.stride_j;
      const float x = to_float(row[c]);
      sum = __fadd_rn(sum, __fmul_rn(x, x));
    }
  }
  *square = sum;
}

MeanParameters parameters_of(const EncodeCall& call) {
  return {call.sequence,
          call.balance,
          call.codec.layout,
          int32_t(call.begin),
          int32_t(call.end),
          int32_t(call.opening),
          int32_t(call.query_windows),
          int32_t(call.shape.rows.key_dim),
          int32_t(call.shape.rows.bytes())};
}

}  // namespace

void launch_balance(const EncodeCall& call, cudaStream_t stream) {
  const MeanParameters p = parameters_of(call);
  const unsigned heads = unsigned(p.layout.kv_heads), threads = unsigned(p.layout.rotated_dim);
  const int32_t size = int32_t(p.layout.block);
  const dim3 grid(unsigned((p.opening - 1) / size - p.begin / size + 1), heads);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    sum_opening<Element><<<grid, threads, 0, stream>>>(p);
  });
  set_balance<<<heads, threads, 0, stream>>>(p);
  check_launch("balance");
}

void launch_means(const EncodeCall& call, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const MeanParameters p = parameters_of(call);
  const int64_t blocks = (call.end - 1) / p.layout.block - call.begin / p.layout.block + 1;
  const dim3 grid(unsigned(blocks), unsigned(p.layout.kv_heads));
  const unsigned threads = unsigned(p.layout.rotated_dim);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    store_means<Element><<<grid, threads, 0, stream>>>(p);
  });
  check_launch("means");
}

void launch_observe(const ObserveCall& call, cudaStream_t stream) {
  const unsigned heads = unsigned(call.shape.kv_heads);
  const unsigned threads = unsigned((call.shape.rows.key_dim + 31) / 32 * 32);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    observe_queries<Element><<<heads, threads, 0, stream>>>(call);
  });
  check_launch("observe");
}

}  // namespace pariskv::cuda
