/**
 * Attention on the tensor cores to rows that come straight from memory into registers: what a warp
 * does with eight of them, whatever brought them there. Of a product with four query heads a lane
 * 4 g + t has row g of the keys, and rows 2 t and 2 t + 1 of values and logits. Weights are in two
 * terms, so that they keep more bits than an element: column g of a product is the first of head g,
 * or the second of head g - 4.
 */
#pragma once

#include "device/attend_shape.cuh"
#include "device/matrix.cuh"
#include "device/softmax.cuh"
#include "device/stored_rows.cuh"
#include "device/tiles.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** Query heads of a pass: the columns of an instruction are theirs, once for each term. */
constexpr int kDirectHeads = 4;
constexpr int kDirectWarps = 4;
constexpr int kDirectThreads = 32 * kDirectWarps;

/** g and t of a lane, as fragments are described (matrix.cuh). */
__device__ __forceinline__ int fragment_row() { return lane_id() / 4; }
__device__ __forceinline__ int fragment_pair() { return lane_id() % 4; }

/** Queries of a pass in shared memory, rows apart so that pieces of all heads meet all banks. */
template <int kWords, typename Element>
using DirectQueries = Element[kDirectHeads][32 * kWords + 32];

/** Queries from `first_head` on, zeros where there are none; threads [0, kDirectThreads / 2). */
template <int kWords, typename Element>
__device__ __forceinline__ void stage_queries(const AttendShape& shape, const Element* q,
                                              int64_t stride, int first_head,
                                              DirectQueries<kWords, Element>& to) {
  constexpr int kDim = 32 * kWords, kHalf = kDirectThreads / 2;
#pragma unroll 4
  for (int i = int(threadIdx.x) % kHalf; i < kDirectHeads * kDim; i += kHalf) {
    const int head = i / kDim, d = i % kDim;
    const bool there = first_head + head < shape.group && d < shape.key_dim;
    to[head][d] = there ? q[head * stride + d] : from_float<Element>(0);
  }
}

/** The new row, which may lie anyhow, as a stored one; threads from kDirectThreads / 2 on. */
template <typename Reader, typename Element>
__device__ __forceinline__ void stage_row(const AttendShape& shape, const NewRow<Element>& row,
                                          char* to) {
  constexpr int kHalf = kDirectThreads / 2;
  if constexpr (!Reader::kScaled) {  // no row of a zone is new
    Reader::write(to, row.k, shape.key_dim, row.v, shape.value_dim, int(threadIdx.x) % kHalf,
                  kHalf);
  }
}

/** Logits of eight rows' keys, of which a lane has pieces t, t + 4, ...: of head g % 4. */
template <int kWords, typename Element, typename Reader>
__device__ __forceinline__ float2 logits_of(const DirectQueries<kWords, Element>& queries,
                                            const typename Reader::Piece (&keys)[kWords],
                                            const AttendShape& shape) {
  float dots[2][4] = {};
#pragma unroll
  for (int c = 0; c < kWords; ++c) {
    const uint4 query = *reinterpret_cast<const uint4*>(
        &queries[fragment_row() % kDirectHeads][8 * (4 * c + fragment_pair())]);
    const uint32_t lower[4] = {query.x, 0, query.y, 0}, upper[4] = {query.z, 0, query.w, 0};
    const uint4 key = Reader::elements(keys[c]);
    multiply<Element>(dots[0], lower, key.x, key.y);
    multiply<Element>(dots[1], upper, key.z, key.w);
  }
  float logits[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    logits[i] = soft_capped((dots[0][i] + dots[1][i]) * shape.scale, shape.softcap);
  }
  return make_float2(logits[0], logits[1]);
}

/** The maximum of a lane's logits joins `sums`; returns what sums so far are multiplied with. */
template <typename Sums>
__device__ __forceinline__ float raise_to(float top, Sums& sums, float& shift) {
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  shift = top == -infinity() ? 0.0f : top;
  const float rescale = exp_of(sums.maximum - shift);
  sums.maximum = top;
  sums.sum = __fmul_rn(sums.sum, rescale);
  return rescale;
}

/** The weights of eight rows, as a product takes them. */
template <typename Element, typename Sums>
__device__ __forceinline__ uint32_t weigh(float2 logits, float shift, Sums& sums) {
  const float a = exp_of(logits.x - shift), b = exp_of(logits.y - shift);
  sums.sum = __fadd_rn(sums.sum, __fadd_rn(a, b));
  uint32_t rest;
  const uint32_t whole = pack<Element>(a, b, rest);
  return fragment_row() < kDirectHeads ? whole : rest;
}

/** What the heads of a lane's two columns are rescaled with. */
struct ColumnScales {
  float even, odd;

  __device__ __forceinline__ explicit ColumnScales(float rescale)
      : even(__shfl_sync(~0u, rescale, 8 * (fragment_pair() % 2))),
        odd(__shfl_sync(~0u, rescale, 8 * (fragment_pair() % 2) + 4)) {}
  __device__ __forceinline__ void apply(float (&sums)[4]) const {
    sums[0] *= even, sums[1] *= odd, sums[2] *= even, sums[3] *= odd;
  }
};

/**
 * Both terms of a head together: a lane is left with two dimensions of one of its two columns, the
 * `second` one where joins_second(): of head 2 (t % 2), or of the one after it.
 */
__device__ __forceinline__ float2 join_columns(const float (&sums)[4], bool second) {
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float own = sums[2 * i], other = sums[2 * i + 1];
    pair[i] = (second ? other : own) + __shfl_xor_sync(~0u, second ? own : other, 2);
  }
  return make_float2(pair[0], pair[1]);
}
__device__ __forceinline__ bool joins_second() { return fragment_pair() >= 2; }

/** The sum of all lanes that have rows of a head. */
__device__ __forceinline__ float sum_of_head(float sum) {
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

}  // namespace pariskv::cuda::device
