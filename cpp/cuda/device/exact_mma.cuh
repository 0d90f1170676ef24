/**
 * Exact attention in 16 bits, on the tensor cores. A warp owns 16 queries, whose products with a
 * tile of rows and whose weighted sums stay in its registers; the warps of a block share tiles.
 */
#pragma once

#include "device/exact.cuh"
#include "device/matrix.cuh"

namespace pariskv::cuda::device {

constexpr int kMmaThreads = 256;
constexpr int kMmaQueries = kMmaThreads / 32 * 16;  // of a block

template <int kDim>
constexpr int kMmaRows = kDim > 256   ? 16
                         : kDim > 128 ? 32
                                      : 64;
/** Of a staged row, in bytes: 16 more than it has, so that eight rows meet all banks. */
template <int kDim>
constexpr int kMmaPitch = 4 * kDim + 16;
/** One tile is worked on while the next is on its way. */
template <int kDim>
constexpr int kMmaBytes = 2 * kMmaRows<kDim> * kMmaPitch<kDim>;

/** The running softmax of the two queries of a lane, in powers of two, and their sums. */
template <typename Element, int kDim>
struct MmaState {
  static constexpr int kRows = kMmaRows<kDim>, kPitch = kMmaPitch<kDim>;
  static constexpr float kLog2E = 1.44269504088896341f;

  uint32_t query[kDim / 16][4];
  float weighted[kDim / 8][4] = {};
  float maximum[2] = {-infinity(), -infinity()};
  float sum[2] = {};  // of this lane's columns
  int limit[2];

  /** Products of the queries with the keys of a tile. */
  __device__ __forceinline__ void score(uint32_t tile, float (&s)[kRows / 8][4]) {
    const int lane = int(threadIdx.x) % 32;
    const uint32_t own = tile + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, own + i * 16 * kPitch + k * 32);
        multiply<Element>(s[2 * i], query[k], b[0], b[1]);
        multiply<Element>(s[2 * i + 1], query[k], b[2], b[3]);
      }
    }
  }

  /** Products to weights, and what was summed before to the new maximum. */
  __device__ __forceinline__ void weigh(float (&s)[kRows / 8][4], int first, float scale,
                                        float softcap) {
    const int column = int(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int visible = limit[r] - first - column;
      float top = maximum[r];
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[i][2 * r + j];
          x = capped(x * scale, softcap) * kLog2E;
          if (8 * i + j < visible) top = fmaxf(top, x);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float keep = maximum[r] == top ? 1.0f : ptx::ex2_approx_ftz(maximum[r] - top);
      maximum[r] = top;
      float total = 0;
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[i][2 * r + j];
          x = 8 * i + j < visible ? ptx::ex2_approx_ftz(x - top) : 0.0f;
          total += x;
        }
      }
      sum[r] = fmaf(sum[r], keep, total);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        weighted[i][2 * r] *= keep;
        weighted[i][2 * r + 1] *= keep;
      }
    }
  }

  /**
   * Adds the values of a tile, weighted. Weights of 8 or 11 bits alone would cost the output's last
   * bits, so what rounding takes from them goes in as a second term.
   */
  __device__ __forceinline__ void add(const float (&s)[kRows / 8][4], uint32_t tile) {
    const int lane = int(threadIdx.x) % 32;
    const uint32_t own = tile + lane % 16 * kPitch + 2 * kDim + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      uint32_t a[4], rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &s[2 * k + i / 2][2 * (i % 2)];
        a[i] = pack<Element>(pair[0], pair[1], rest[i]);
      }
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, own + k * 16 * kPitch + i * 32);
        multiply<Element>(weighted[2 * i], a, b[0], b[1]);
        multiply<Element>(weighted[2 * i + 1], a, b[2], b[3]);
        multiply<Element>(weighted[2 * i], rest, b[0], b[1]);
        multiply<Element>(weighted[2 * i + 1], rest, b[2], b[3]);
      }
    }
  }

  /** Takes values that are not finite to the queries that see them: no weight of 0 hides them. */
  __device__ __forceinline__ void add_strange(const Element* tile, int first) {
    const int column = int(threadIdx.x) % 4 * 2;
    for (int row = 0; row < kRows; ++row) {
      const Element* values = tile + row * (kPitch / 2) + kDim;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float value = to_float(values[8 * i + column + j % 2]);
          if (!finite(value) && first + row < limit[j / 2]) weighted[i][j] += value;
        }
      }
    }
  }
};

/** With kPadded, keys and values have key_dim and value_dim of the kDim dimensions. */
template <typename Element, int kDim, bool kPadded>
__global__ void __launch_bounds__(kMmaThreads) attend_exact_mma(ExactParameters p) {
  using State = MmaState<Element, kDim>;
  constexpr int kRows = State::kRows, kPitch = State::kPitch;
  extern __shared__ uint4 staged[];
  const uint32_t tiles = shared_address(staged);
  const int head = int(blockIdx.y), warp = int(threadIdx.x) / 32;
  const int row = int(threadIdx.x) % 32 / 4, column = int(threadIdx.x) % 4 * 2;
  // The blocks with most to do come first.
  const int64_t block = (int64_t(gridDim.x) - 1 - blockIdx.x) * kMmaQueries;
  const int64_t own = block + warp * 16 + row;
  const ExactQuery queries[2] = {{p, head, own}, {p, head, own + 8}};

  State state;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.limit[r] = queries[r].limit;
    const Element* q = queries[r].template input<Element>(p);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      uint32_t two = 0;
      if (queries[r].limit > 0 && (!kPadded || 8 * i + column < p.key_dim)) {
        two = element_bits(q[8 * i + column]) | uint32_t(element_bits(q[8 * i + column + 1])) << 16;
      }
      state.query[i / 2][i % 2 * 2 + r] = two;
    }
  }
  const int64_t last = min(block + kMmaQueries, p.tokens * p.group) - 1;
  const int rows = int(p.total - p.tokens + last / p.group + 1);
  const int seen_by_all = int(p.total - p.tokens + block / p.group + 1);
  const bool idle = block + warp * 16 >= p.tokens * p.group;

  stage_rows<Element, kDim, kPadded, kRows, kPitch, kMmaThreads>(p, head, 0, rows, tiles);
  for (int first = 0; first < rows; first += kRows) {
    const int half = first / kRows % 2;
    const uint32_t tile = tiles + half * kRows * kPitch;
    if (first + kRows < rows) {
      stage_rows<Element, kDim, kPadded, kRows, kPitch, kMmaThreads>(
          p, head, first + kRows, rows, tiles + (1 - half) * kRows * kPitch);
    } else {
      ptx::cp_async_commit_group();
    }
    ptx::cp_async_wait_group<1>();
    __syncthreads();
    if (first + kRows > seen_by_all) {  // some row is hidden from some query
      Element* elements = reinterpret_cast<Element*>(staged) + half * kRows * (kPitch / 2);
      const auto value = [&](int i) -> Element& {
        return elements[i / kDim * (kPitch / 2) + kDim + i % kDim];
      };
      bool strange = false;
      for (int i = threadIdx.x; i < kRows * kDim; i += kMmaThreads) {
        strange = strange || !finite(to_float(value(i)));
      }
      if (__syncthreads_or(strange)) {
        state.add_strange(elements, first);
        __syncthreads();
        for (int i = threadIdx.x; i < kRows * kDim; i += kMmaThreads) {
          if (!finite(to_float(value(i)))) value(i) = from_float<Element>(0.0f);
        }
        __syncthreads();
      }
    }
    if (!idle) {
      float s[kRows / 8][4];
      state.score(tile, s);
      state.weigh(s, first, p.scale, p.softcap);
      state.add(s, tile);
    }
    __syncthreads();
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (queries[r].limit == 0) continue;
    const float share = finish(p, queries[r], state.maximum[r] / State::kLog2E, sum, column == 0);
    if (p.out == nullptr) continue;
    Element* out = queries[r].template output<Element>(p);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      if (kPadded && 8 * i + column >= p.value_dim) break;
      out[8 * i + column] = from_float<Element>(state.weighted[i][2 * r] * share);
      out[8 * i + column + 1] = from_float<Element>(state.weighted[i][2 * r + 1] * share);
    }
  }
}

}  // namespace pariskv::cuda::device
