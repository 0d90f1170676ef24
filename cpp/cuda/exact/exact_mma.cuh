/**
 * Exact attention in 16 bits, on the tensor cores. A warp owns 16 or 32 queries, whose products
 * with a tile of rows and whose weighted sums stay in its registers; the warps of a block share
 * tiles.
 */
#pragma once

#include "exact/running_softmax.cuh"

namespace pariskv::cuda::device {

constexpr int kMmaThreads = 128;
/** Groups of 16 queries of a warp: every word of a row is read from shared memory for all. */
template <int kDim>
constexpr int kMmaGroups = kDim > 128 ? 1 : 2;
template <int kDim>
constexpr int kMmaQueries = kMmaThreads / 32 * 16 * kMmaGroups<kDim>;  // of a block

template <int kDim>
constexpr int kMmaRows = kDim > 256 ? 16 : 32;
/** Of a staged row, in bytes: 16 more than it has, so that eight rows meet all banks. */
template <int kDim>
constexpr int kMmaPitch = 4 * kDim + 16;
/** One tile is worked on while the next is on its way. */
template <int kDim>
constexpr int kMmaBytes = 2 * kMmaRows<kDim> * kMmaPitch<kDim>;

/** The products of a warp's queries. */
template <typename Element, int kDim>
struct MmaState : RunningSoftmax<Element, kDim, kMmaRows<kDim>, kMmaGroups<kDim>> {
  using Softmax = RunningSoftmax<Element, kDim, kMmaRows<kDim>, kMmaGroups<kDim>>;
  using typename Softmax::Products;
  static constexpr int kRows = kMmaRows<kDim>, kPitch = kMmaPitch<kDim>;
  static constexpr int kGroups = kMmaGroups<kDim>;

  /** Products of the queries with the keys of a tile. */
  __device__ __forceinline__ void score(uint32_t tile, Products& s) {
    const int lane = int(threadIdx.x) % 32;
    const uint32_t own = tile + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) s[g][i][0] = s[g][i][1] = s[g][i][2] = s[g][i][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, own + i * 16 * kPitch + k * 32);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          multiply<Element>(s[g][2 * i], this->query[g][k], b[0], b[1]);
          multiply<Element>(s[g][2 * i + 1], this->query[g][k], b[2], b[3]);
        }
      }
    }
  }

  /** Adds the values of a tile, weighted; with kRest, by what rounding takes from the weights. */
  template <bool kRest>
  __device__ __forceinline__ void add(const Products& s, uint32_t tile) {
    const int lane = int(threadIdx.x) % 32;
    const uint32_t own = tile + lane % 16 * kPitch + 2 * kDim + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      uint32_t a[kGroups][4];
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        const float* pair = &s[i / 4][2 * k + i % 4 / 2][2 * (i % 2)];
        uint32_t& two = a[i / 4][i % 4];
        if constexpr (kRest) {
          pack<Element>(pair[0], pair[1], two);
        } else {
          two = pack<Element>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, own + k * 16 * kPitch + i * 32);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          multiply<Element>(this->weighted[g][2 * i], a[g], b[0], b[1]);
          multiply<Element>(this->weighted[g][2 * i + 1], a[g], b[2], b[3]);
        }
      }
    }
  }
};

/** With kPadded, keys and values have key_dim and value_dim of the kDim dimensions. */
template <typename Element, int kDim, bool kPadded>
__global__ void __launch_bounds__(kMmaThreads) attend_exact_mma(ExactParameters p) {
  using State = MmaState<Element, kDim>;
  constexpr int kRows = State::kRows, kPitch = State::kPitch, kOwn = State::kOwn;
  extern __shared__ uint4 staged[];
  const uint32_t tiles = shared_address(staged);
  const int head = int(blockIdx.y), warp = int(threadIdx.x) / 32;
  const int row = int(threadIdx.x) % 32 / 4;
  const int64_t block = exact_first_query(p, kMmaQueries<kDim>);
  const int64_t first_query = block + warp * 16 * State::kGroups;
  const auto index_of = [&](int own) { return first_query + own * 8 + row; };
  const auto limit_of = [&](int own) { return ExactQuery(p, head, index_of(own)).limit; };
  const int64_t last = min(block + kMmaQueries<kDim>, p.tokens * p.group) - 1;
  const ExactRows rows(p, last);
  if (rows.empty() && p.resumes) return;

  State state;
  state.template start<kPadded>(p, head, index_of);
  const int seen_by_all = int(p.total - p.tokens + block / p.group + 1);
  const bool capping = p.softcap > 0 || !(p.scale > 0);
  const float unit = capping ? kLog2E<Element> : p.scale * kLog2E<Element>;
  const bool idle = first_query >= p.tokens * p.group;

  const auto stage = [&](int first) {
    stage_rows<Element, kDim, kPadded, kRows, kPitch, kMmaThreads>(
        p, head, first, rows.end, tiles + first / kRows % 2 * kRows * kPitch);
  };
  if (!rows.empty()) stage(rows.first);
  for (int first = rows.first, next; first < rows.end; first = next) {
    next = rows.next(p, first, kRows);
    const int half = first / kRows % 2;  // a share's turns are of even numbers of tiles
    const uint32_t tile = tiles + half * kRows * kPitch;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and no warp needs the one before any more
    if (next < rows.end) stage(next);
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
        state.add_strange([&](int row, int d) { return value(row * kDim + d); }, first, limit_of);
        __syncthreads();
        for (int i = threadIdx.x; i < kRows * kDim; i += kMmaThreads) {
          if (!finite(to_float(value(i)))) value(i) = from_float<Element>(0.0f);
        }
        __syncthreads();
      }
    }
    if (!idle) {
      typename State::Products s;
      state.score(tile, s);
      if (capping) state.cap(s, p.scale, p.softcap);
      if (first + kRows > seen_by_all) state.hide(s, first, limit_of);
      float rescale[kOwn];
      const bool heavy = !__all_sync(0xffffffffu, !state.weigh(s, unit, rescale) || p.fast);
      state.rescale_sums(rescale);
      state.template add<false>(s, tile);
      if (heavy) state.template add<true>(s, tile);
    }
  }

  state.template finish<kPadded>(p, head, index_of);
}

}  // namespace pariskv::cuda::device
