/**
 * Exact attention in 16 bits, on the tensor cores. A warp owns 16 or 32 queries, whose products
 * with a tile of rows and whose weighted sums stay in its registers; the warps of a block share
 * tiles.
 */
#pragma once

#include "device/exact.cuh"
#include "device/matrix.cuh"

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

/** What a logit is multiplied by before it becomes a power: of 2 in 16 bits, else of e. */
template <typename Element>
constexpr float kLog2E = sizeof(Element) == 2 ? 1.44269504088896341f : 1.0f;

/**
 * Weights of 8 or 11 bits alone would cost the output's last bits. So what rounding takes from them
 * is added as a second term in tiles where a weight is more than 1/4096 of all before. The errors
 * of weights that are smaller average out: to 2^-16 of a value in bfloat16, at most. A lane
 * compares with the sum of its own columns, a quarter of all.
 */
constexpr float kLightShares = 4096.0f / 4;

/** The running softmax of a lane's queries, two in each group, in powers of two, and their sums. */
template <typename Element, int kDim>
struct MmaState {
  static constexpr int kRows = kMmaRows<kDim>, kPitch = kMmaPitch<kDim>;
  static constexpr int kGroups = kMmaGroups<kDim>, kOwn = 2 * kGroups;
  using Products = float[kGroups][kRows / 8][4];

  uint32_t query[kGroups][kDim / 16][4];
  float weighted[kGroups][kDim / 8][4] = {};
  float maximum[kOwn];
  float sum[kOwn] = {};  // of this lane's columns

  /** Goes on from a state that was kept, for one of the queries. */
  __device__ __forceinline__ void load(int own, const float* state) {
    const int column = int(threadIdx.x) % 4 * 2, r = own % 2 * 2;
    maximum[own] = state[0];
    sum[own] = state[1 + column / 2];
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(state + kStateWeighted + 8 * i + column);
      weighted[own / 2][i][r] = two.x, weighted[own / 2][i][r + 1] = two.y;
    }
  }
  __device__ __forceinline__ void store(int own, float* state) const {
    const int column = int(threadIdx.x) % 4 * 2, r = own % 2 * 2;
    if (column == 0) state[0] = maximum[own];
    state[1 + column / 2] = sum[own];
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      *reinterpret_cast<float2*>(state + kStateWeighted + 8 * i + column) = {
          weighted[own / 2][i][r], weighted[own / 2][i][r + 1]};
    }
  }

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
          multiply<Element>(s[g][2 * i], query[g][k], b[0], b[1]);
          multiply<Element>(s[g][2 * i + 1], query[g][k], b[2], b[3]);
        }
      }
    }
  }

  /** Makes logits of products where a factor alone does not. */
  __device__ __forceinline__ void cap(Products& s, float scale, float softcap) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4 * (kRows / 8); ++i) {
        s[g][i / 4][i % 4] = capped(s[g][i / 4][i % 4] * scale, softcap);
      }
    }
  }
  /** Hides rows from queries that do not see them; limit_of(own) is what one sees. */
  template <typename LimitOf>
  __device__ __forceinline__ void hide(Products& s, int first, LimitOf limit_of) {
    const int column = int(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int visible = limit_of(own) - first - column;
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (8 * i + j >= visible) s[own / 2][i][own % 2 * 2 + j] = -infinity();
        }
      }
    }
  }

  /**
   * Logits to weights, and what was summed before to the new maximum.
   * @param unit  more than 0: what makes powers of two of logits
   * @return whether some weight is more than a small part of all until now
   */
  __device__ __forceinline__ bool weigh(Products& s, float unit) {
    bool heavy = false;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int g = own / 2, r = own % 2 * 2;
      float top = -infinity();
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) top = fmaxf(top, fmaxf(s[g][i][r], s[g][i][r + 1]));
      const float own_top = top;
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top = fmaxf(maximum[own], top * unit);
      const float keep = maximum[own] == top ? 1.0f : ptx::ex2_approx_ftz(maximum[own] - top);
      maximum[own] = top;
      const float base = top == -infinity() ? 0.0f : top;
      float total = 0;
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[g][i][r + j];
          x = ptx::ex2_approx_ftz(__fmul_rn(x, unit) - base);  // rounded as the maximum was
          total += x;
        }
      }
      sum[own] = fmaf(sum[own], keep, total);
      const float largest = ptx::ex2_approx_ftz(__fmul_rn(own_top, unit) - base);
      heavy = heavy || largest * kLightShares > sum[own];
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        weighted[g][i][r] *= keep;
        weighted[g][i][r + 1] *= keep;
      }
    }
    return !__all_sync(0xffffffffu, !heavy);
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
          multiply<Element>(weighted[g][2 * i], a[g], b[0], b[1]);
          multiply<Element>(weighted[g][2 * i + 1], a[g], b[2], b[3]);
        }
      }
    }
  }

  /** Takes values that are not finite to the queries that see them: no weight of 0 hides them. */
  template <typename LimitOf>
  __device__ __forceinline__ void add_strange(const Element* tile, int first, LimitOf limit_of) {
    const int column = int(threadIdx.x) % 4 * 2;
    for (int row = 0; row < kRows; ++row) {
      const Element* values = tile + row * (kPitch / 2) + kDim;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kOwn; ++j) {
          const float value = to_float(values[8 * i + column + j % 2]);
          if (!finite(value) && first + row < limit_of(j / 2)) weighted[j / 4][i][j % 4] += value;
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
  const int row = int(threadIdx.x) % 32 / 4, column = int(threadIdx.x) % 4 * 2;
  // The blocks with most to do come first.
  const int64_t block = (int64_t(gridDim.x) - 1 - blockIdx.x) * kMmaQueries<kDim>;
  const int64_t first_query = block + warp * 16 * State::kGroups;
  const auto index_of = [&](int own) { return first_query + own * 8 + row; };
  const auto limit_of = [&](int own) { return ExactQuery(p, head, index_of(own)).limit; };
  const int64_t last = min(block + kMmaQueries<kDim>, p.tokens * p.group) - 1;
  const ExactRows rows(p, last);
  if (rows.empty() && p.resumes) return;

  State state;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const ExactQuery query(p, head, index_of(own));
    state.maximum[own] = -infinity();
    const Element* q = query.template input<Element>(p);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      uint32_t two = 0;
      if (query.limit > 0 && (!kPadded || 8 * i + column < p.key_dim)) {
        two = element_bits(q[8 * i + column]) | uint32_t(element_bits(q[8 * i + column + 1])) << 16;
      }
      state.query[own / 2][i / 2][i % 2 * 2 + own % 2] = two;
    }
    if (p.resumes && query.limit > 0) {
      state.load(own, exact_state(p, blockIdx.z, gridDim.y, head, index_of(own), kDim));
    }
  }
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
    __syncthreads();  // this tile is there, and nobody needs the one before any more
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
        state.add_strange(elements, first, limit_of);
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
      const bool heavy = state.weigh(s, unit);
      state.template add<false>(s, tile);
      if (heavy) state.template add<true>(s, tile);
    }
  }

#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const ExactQuery query(p, head, index_of(own));
    float sum = state.sum[own];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (query.limit == 0) continue;
    if (p.states != nullptr) {
      state.store(own, exact_state(p, blockIdx.z, gridDim.y, head, index_of(own), kDim));
      continue;
    }
    const float share = finish(p, query, state.maximum[own] / kLog2E<Element>, sum, column == 0);
    if (p.out == nullptr) continue;
    Element* out = query.template output<Element>(p);
    const int r = own % 2 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      if (kPadded && 8 * i + column >= p.value_dim) break;
      const float (&two)[4] = state.weighted[own / 2][i];
      out[8 * i + column] = from_float<Element>(two[r] * share);
      out[8 * i + column + 1] = from_float<Element>(two[r + 1] * share);
    }
  }
}

}  // namespace pariskv::cuda::device
