/**
 * The running softmax of exact attention in 16 bits, in the registers of a warp: of 16 queries or
 * of more, over tiles of rows. Logits and sums lie as the sums of matrix products do.
 */
#pragma once

#include "device/matrix.cuh"
#include "exact/exact.cuh"

namespace pariskv::cuda::device {

/** The factor of a logit before it becomes a power: of 2 in 16 bits, else of e. */
template <typename Element>
constexpr float kLog2E = sizeof(Element) == 2 ? 1.44269504088896341f : 1.0f;

/**
 * Weights of 8 or 11 bits alone would cost the output's last bits. So what rounding takes from them
 * is added as a second term in tiles where a weight is more than 1/4096 of all before. The errors
 * of weights that are smaller average out: to 2^-16 of a value in bfloat16, at most. A lane
 * compares with the sum of its own columns, a quarter of all.
 */
constexpr float kLightShares = 4096.0f / 4;

/**
 * Of a lane's queries, two in each group of 16, in powers of two: rows lane / 4 and that + 8. A
 * tile has kRows rows.
 */
template <typename Element, int kDim, int kRows, int kGroups>
struct RunningSoftmax {
  static constexpr int kOwn = 2 * kGroups;
  using Products = float[kGroups][kRows / 8][4];

  uint32_t query[kGroups][kDim / 16][4];  // fragments, as the first factor of a product has them
  float weighted[kGroups][kDim / 8][4] = {};
  float maximum[kOwn];
  float sum[kOwn] = {};  // of this lane's columns

  /** Takes the queries, and earlier sums, if there are any. */
  template <bool kPadded, typename IndexOf>
  __device__ __forceinline__ void start(const ExactParameters& p, int head, IndexOf index_of) {
    const int column = int(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const ExactQuery mine(p, head, index_of(own));
      const Element* q = mine.template input<Element>(p);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const int d = 8 * i + column;
        uint32_t two = 0;
        if (mine.limit > 0 && (!kPadded || d < p.key_dim)) {
          two = element_bits(q[d]) | uint32_t(element_bits(q[d + 1])) << 16;
        }
        query[own / 2][i / 2][i % 2 * 2 + own % 2] = two;
      }
      maximum[own] = -infinity();
      if (p.resumes && mine.limit > 0) {
        load(own, exact_state(p, blockIdx.z, gridDim.y, head, index_of(own), kDim));
      }
    }
  }
  /** Goes on from a stored state, for one of the queries. */
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
   * Logits to weights.
   * @param unit  more than 0: what makes powers of two of logits
   * @param rescale  the factor of all sums until now: see `rescale_sums`
   * @return whether, in this lane, some weight is more than a small part of all until now
   */
  __device__ __forceinline__ bool weigh(Products& s, float unit, float (&rescale)[kOwn]) {
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
      rescale[own] = maximum[own] == top ? 1.0f : ptx::ex2_approx_ftz(maximum[own] - top);
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
      sum[own] = fmaf(sum[own], rescale[own], total);
      const float largest = ptx::ex2_approx_ftz(__fmul_rn(own_top, unit) - base);
      heavy = heavy || largest * kLightShares > sum[own];
    }
    return heavy;
  }
  /**
   * The same of several tiles at once, in fewer instructions and with a little less: a maximum
   * stays as long as no weight of a tile would be above 2^kRoom, and its rounding may leave a
   * weight that is as much too large as all others are.
   */
  template <int kTiles>
  __device__ __forceinline__ void weigh_fast(Products (&tiles)[kTiles], float unit,
                                             float (&rescale)[kOwn]) {
    constexpr float kRoom = 8;
    constexpr float kLarge = 0x1p24f;  // from here on rounding may double a weight, and worse
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int g = own / 2, r = own % 2 * 2;
      float tops[2] = {-infinity(), -infinity()};
#pragma unroll
      for (int i = 0; i < kTiles * (kRows / 8); ++i) {
        const float (&two)[4] = tiles[i / (kRows / 8)][g][i % (kRows / 8)];
        tops[i % 2] = fmaxf(tops[i % 2], fmaxf(two[r], two[r + 1]));
      }
      float top = fmaxf(tops[0], tops[1]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * unit;
      // Not for a first maximum, nor for infinite ones, whose difference is NaN.
      const bool stays = top - maximum[own] <= kRoom;
      top = stays ? maximum[own] : fmaxf(maximum[own], top);
      rescale[own] = maximum[own] == top ? 1.0f : ptx::ex2_approx_ftz(maximum[own] - top);
      maximum[own] = top;
      const float base = top == -infinity() ? 0.0f : top;
      float factor = unit;
      if (!(fabsf(base) < kLarge)) {  // round each as the maximum was
        factor = 1;
#pragma unroll
        for (int i = 0; i < kTiles * (kRows / 8); ++i) {
          float (&two)[4] = tiles[i / (kRows / 8)][g][i % (kRows / 8)];
          two[r] *= unit, two[r + 1] *= unit;
        }
      }
      float totals[2] = {};
#pragma unroll
      for (int i = 0; i < kTiles * (kRows / 8); ++i) {
        float (&two)[4] = tiles[i / (kRows / 8)][g][i % (kRows / 8)];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          two[r + j] = ptx::ex2_approx_ftz(fmaf(two[r + j], factor, -base));
          totals[j] += two[r + j];
        }
      }
      sum[own] = fmaf(sum[own], rescale[own], totals[0] + totals[1]);
    }
  }
  /** The weighted sums until now, to a new maximum. */
  __device__ __forceinline__ void rescale_sums(const float (&rescale)[kOwn]) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int g = own / 2, r = own % 2 * 2;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        weighted[g][i][r] *= rescale[own];
        weighted[g][i][r + 1] *= rescale[own];
      }
    }
  }

  /** Takes values that are not finite to the queries that see them: no weight of 0 hides them. */
  template <typename ValueOf, typename LimitOf>
  __device__ __forceinline__ void add_strange(ValueOf value_of, int first, LimitOf limit_of) {
    const int column = int(threadIdx.x) % 4 * 2;
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kOwn; ++j) {
          const float value = to_float(value_of(row, 8 * i + column + j % 2));
          if (!finite(value) && first + row < limit_of(j / 2)) weighted[j / 4][i][j % 4] += value;
        }
      }
    }
  }

  /**
   * Stores the states, or writes the outputs where there is nothing to come.
   * @param index_of  the number of a query among the kv head's
   */
  template <bool kPadded, typename IndexOf>
  __device__ __forceinline__ void finish(const ExactParameters& p, int head, IndexOf index_of) {
    const int column = int(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const ExactQuery query(p, head, index_of(own));
      float all = sum[own];
      all += __shfl_xor_sync(0xffffffffu, all, 1);
      all += __shfl_xor_sync(0xffffffffu, all, 2);
      if (query.limit == 0) continue;
      if (p.states != nullptr) {
        store(own, exact_state(p, blockIdx.z, gridDim.y, head, index_of(own), kDim));
        continue;
      }
      const float share =
          device::finish(p, query, maximum[own] / kLog2E<Element>, all, column == 0);
      if (p.out == nullptr) continue;
      Element* out = query.template output<Element>(p);
      const int r = own % 2 * 2;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        if (kPadded && 8 * i + column >= p.value_dim) break;
        const float (&two)[4] = weighted[own / 2][i];
        out[8 * i + column] = from_float<Element>(finite_or_nan(two[r] * share));
        out[8 * i + column + 1] = from_float<Element>(finite_or_nan(two[r + 1] * share));
      }
    }
  }
};

}  // namespace pariskv::cuda::device
