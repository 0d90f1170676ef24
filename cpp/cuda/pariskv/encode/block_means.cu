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
constexpr int kAhead = 8;  // loads that a thread has on their way
constexpr int kTileBytes = 16 << 10;

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
struct Keys {
  const char* rows;
  int row_bytes, dim, count;

  __device__ __forceinline__ Keys(const MeanParameters& p, int head, int begin, int end)
      : row_bytes(p.row_bytes), dim(p.dim), count(end - begin) {
    const int tokens = int(p.layout.tokens), segment = begin / tokens;
    rows = row_of_segment(static_cast<const char*>(p.sequence->rows[segment]), head, tokens,
                          begin - segment * tokens, row_bytes);
  }
};

/**
 * Keys in shared memory, as many as there is room for: a thread adds them up one after the other,
 * and would wait for each of them.
 */
template <typename Element>
struct KeyTile {
  uint4 pieces[kTileBytes / sizeof(uint4)];
  uint8_t whole[kMostBlock];  // whether a key is finite
  int first;                  // of the keys that are here

  /** All threads, before the first tile. */
  __device__ __forceinline__ void open() {
    if (threadIdx.x == 0) first = -1;
    __syncthreads();
  }

  /** Calls visit(x) for the channel of every finite key, in order. All threads. */
  template <typename Visit>
  __device__ __forceinline__ void each_finite(const Keys& keys, int channel, Visit visit) {
    const int pieces_of_key = keys.dim / kElementsPer16<Element>;
    const int most = int(kTileBytes / sizeof(uint4)) / pieces_of_key;
    for (int begin = 0; begin < keys.count; begin += most) {
      const int count = min(most, keys.count - begin);
      if (first != begin) {
        __syncthreads();  // nobody reads the keys before them any more
        load(keys, begin, count, pieces_of_key);
      }
      if (channel >= keys.dim) continue;
      const auto* const x = reinterpret_cast<const Element*>(pieces) + channel;
#pragma unroll 4
      for (int key = 0; key < count; ++key) {
        if (whole[key] != 0) visit(to_float(x[key * keys.dim]));
      }
    }
  }

 private:
  __device__ __forceinline__ void load(const Keys& keys, int begin, int count, int pieces_of_key) {
    const int all = count * pieces_of_key, step = int(blockDim.x);
    for (int at = int(threadIdx.x); at < all; at += kAhead * step) {
      uint4 own[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = min(at + i * step, all - 1), key = piece / pieces_of_key;
        const char* row = keys.rows + int64_t(begin + key) * keys.row_bytes;
        own[i] = reinterpret_cast<const uint4*>(row)[piece - key * pieces_of_key];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i * step < all) pieces[at + i * step] = own[i];
      }
    }
    if (threadIdx.x == 0) first = begin;
    __syncthreads();
    const auto* const x = reinterpret_cast<const Element*>(pieces);
    for (int key = warp_id(); key < count; key += step / 32) {
      bool own = true;
      for (int c = lane_id(); c < keys.dim; c += 32) own &= finite(to_float(x[key * keys.dim + c]));
      own = __all_sync(~0u, own);
      if (lane_id() == 0) whole[key] = own;
    }
    __syncthreads();
  }
};

/** One channel of the finite keys. */
struct ChannelSum {
  double sum = 0;
  int count = 0;

  /** 0 where no key is finite. */
  __device__ __forceinline__ double mean() const {
    return count > 0 ? __ddiv_rn(sum, double(count)) : 0.0;
  }
};

/** All threads. */
template <typename Element>
__device__ __forceinline__ ChannelSum sum_of(KeyTile<Element>& tile, const Keys& keys,
                                             int channel) {
  ChannelSum own;
  tile.each_finite(keys, channel, [&](float x) {
    own.sum = __dadd_rn(own.sum, double(x));
    ++own.count;
  });
  return own;
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
  __shared__ KeyTile<Element> tile;
  __shared__ double room[kMostThreads / 32];
  const int head = int(blockIdx.y), size = int(p.layout.block);
  const int number = p.begin / size + int(blockIdx.x);
  const int begin = max(number * size, p.begin), end = min((number + 1) * size, p.end);
  const int c = int(threadIdx.x);
  tile.open();
  const ChannelSum own_sum = sum_of(tile, Keys(p, head, begin, end), c);
  double mean = 0;
  if (c < p.dim && own_sum.count > 0) {
    const int at = head * p.dim + c;
    mean = __dmul_rn(own_sum.mean(), double(p.balance.gain[at]));
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
  __shared__ KeyTile<Element> tile;
  const int head = int(blockIdx.y), size = int(p.layout.block), c = int(threadIdx.x);
  const int number = p.begin / size + int(blockIdx.x);
  const Keys keys(p, head, max(number * size, p.begin), (number + 1) * size);
  tile.open();
  const ChannelSum centre = sum_of(tile, keys, c);
  const double mean = centre.mean();
  double own = 0;
  tile.each_finite(keys, c, [&](float x) {
    const double left = __dsub_rn(double(x), mean);
    own = __fma_rn(left, left, own);
  });
  const BlockSums sums(p, head, number);
  if (c == 0) *sums.count = double(centre.count);
  if (c >= p.dim) return;
  sums.left[c] = own;
  sums.centre[c] = centre.sum;
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
  for (int first = 0; there && first < p.query_windows; first += kAhead) {
    float squares[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t w = min(first + i, p.query_windows - 1);
      squares[i] = p.balance.query_squares[(w * p.layout.kv_heads + head) * p.dim + c];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < p.query_windows) query = __dadd_rn(query, double(squares[i]));
    }
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
  constexpr int kQueriesAhead = 32;
  const int64_t all = call.positions * group;  // position by position
  for (int64_t first = 0; first < all; first += kQueriesAhead) {
    Element x[kQueriesAhead];
#pragma unroll
    for (int i = 0; i < kQueriesAhead; ++i) {
      const int query = int(first + i < all ? first + i : all - 1), position = query / group;
      const auto* row = reinterpret_cast<const Element*>(call.q.data) + position * call.q.stride_i +
                        (head * group + query - position * group) * call.q.stride_j;
      x[i] = row[c];
    }
#pragma unroll
    for (int i = 0; i < kQueriesAhead; ++i) {
      const float own = to_float(x[i]);
      if (first + i < all) sum = __fadd_rn(sum, __fmul_rn(own, own));
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
