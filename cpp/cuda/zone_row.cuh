/**
 * A row of a zone as it is read outside of attention, and how a half of 8 bits is written: a warp
 * has a row, a lane kAtOnce neighbouring numbers at a time.
 */
#pragma once

#include "device/narrow_rows.cuh"
#include "device/warp.cuh"
#include "ops.h"
#include "row_type.h"

namespace pariskv::cuda::device {

constexpr int kAtOnce = 4;  // neighbouring numbers of a lane: a word of narrow ones
constexpr int kTurns = int(kMaxHeadDim) / (32 * kAtOnce);  // of a lane, at most

/** Where rows of one head of a sequence are: plain, or narrow ones. */
template <typename Element>
struct HeadRows {
  using Four = float (&)[kAtOnce];

  const SequenceView& view;
  const ModelShape& shape;
  int head;
  bool narrow;
  NarrowBase base;

  __device__ __forceinline__ HeadRows(const ModelShape& model, const SequenceView& sequence,
                                      void* state, int kv_head, bool narrow_ones)
      : view(sequence), shape(model), head(kv_head), narrow(narrow_ones), base{} {
    if (narrow) base = NarrowBase::of(shape.narrow_base, state, head);
  }

  struct Row {
    const char* key;
    const char* value;
    NarrowBase::Mean mean;
  };
  __device__ __forceinline__ Row row(int64_t position) const {
    const int64_t tokens = shape.segment_tokens, segment = position / tokens;
    const int64_t slot = position - segment * tokens;
    const RowFormat& rows = narrow ? shape.narrow : shape.rows;
    void* const* table = narrow ? view.narrow_rows : view.rows;
    const char* key =
        row_of_segment(static_cast<const char*>(table[segment]), head, tokens, slot, rows.bytes());
    return {key, key + rows.key_bytes(),
            base.any() ? base.mean(view.summaries[segment], slot) : NarrowBase::Mean{}};
  }

  /** Numbers from d on of K, and of V. */
  __device__ __forceinline__ void key(const Row& row, int d, Four x) const {
    numbers(row.key, int(shape.rows.key_dim), d, x);
    if (!base.any()) return;
    const bool bare = is_bare(row);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      x[i] = base.of_key_back(d + i, bare ? 0.0f : base.of_key(row.mean, d + i))(x[i]);
    }
  }
  __device__ __forceinline__ void value(const Row& row, int d, Four x) const {
    numbers(row.value, int(shape.rows.value_dim), d, x);
    if (!base.any()) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = base.of_value_back(d + i)(x[i]);
  }

  /** One number of K. */
  __device__ __forceinline__ float key_number(const Row& row, int d) const {
    const int dim = int(shape.rows.key_dim);
    if (!narrow) return RowReader<Element>::number(row.key, d, dim);
    const float x = NarrowReader<Element>::number(row.key, d, dim);
    if (!base.any()) return x;
    const bool bare = is_bare(row);
    return base.of_key_back(d, bare ? 0.0f : base.of_key(row.mean, d))(bare ? -x : x);
  }

 private:
  __device__ __forceinline__ bool is_bare(const Row& row) const {
    return NarrowReader<Element>::is_bare(row.key, int(shape.rows.key_dim));
  }
  __device__ __forceinline__ void numbers(const char* half, int dim, int d, Four x) const {
    if (!narrow) return RowReader<Element>::floats(RowReader<Element>::at(half, d), x);
    const float scale = fabsf(NarrowReader<Element>::scale(half, dim));
    NarrowReader<Element>::floats(half + d, x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = __fmul_rn(x[i], scale);
  }
};

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

/** Numbers of a half, of which a lane of a warp has every 32nd word. */
using LaneWords = float[kTurns][kAtOnce];

/** Calls visit(d, x) for the words of a lane. */
template <typename Visit>
__device__ __forceinline__ void each_word(int dim, LaneWords& words, const Visit& visit) {
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int d = (32 * turn + lane_id()) * kAtOnce;
    if (d >= dim) break;
    visit(d, words[turn]);
  }
}

/** The largest magnitude; NaN is left out. All lanes. */
__device__ __forceinline__ float largest_of(int dim, LaneWords& words) {
  float largest = 0;
  each_word(dim, words, [&](int, float (&x)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, fabsf(x[i]));
  });
  return warp_max(largest);
}

/**
 * A half in 8 bits. All lanes of a warp.
 * @param bare  the scale is to have a minus
 */
__device__ __forceinline__ void write_narrow(int dim, LaneWords& words, bool bare, char* to) {
  bool whole = true;
  each_word(dim, words, [&](int, float (&x)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) whole = whole && finite(x[i]);
  });
  const float scale = narrow_scale(largest_of(dim, words), __all_sync(~0u, whole));
  each_word(dim, words, [&](int d, float (&x)[kAtOnce]) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (scale > 0) word |= narrow_number(x[i], scale) << 8 * i;
    }
    *reinterpret_cast<uint32_t*>(to + d) = word;
  });
  if (lane_id() == 0) *reinterpret_cast<float*>(to + dim) = bare && scale >= 0 ? -scale : scale;
}

}  // namespace pariskv::cuda::device
