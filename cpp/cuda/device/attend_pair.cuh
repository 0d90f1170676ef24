/**
 * Two rows more for the running softmaxes of a warp, which has four query heads of one kv head: a
 * step of attend.cuh. A lane holds kWords neighbouring dimensions.
 */
#pragma once

#include <type_traits>

#include "device/attend_shape.cuh"
#include "device/common_rows.cuh"
#include "device/narrow_rows.cuh"
#include "device/softmax.cuh"
#include "device/stored_rows.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** Four running softmaxes; `maximum` and `sum` of head (lane / 4) % 4, the weighted of all. */
template <int kWords>
struct Running {
  float maximum, sum;
  float weighted[4][kWords];

  __device__ __forceinline__ void clear() {
    maximum = -infinity();
    sum = 0;
#pragma unroll
    for (int h = 0; h < 4; ++h) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) weighted[h][i] = 0;
    }
  }
};

/**
 * How far the logit of a row's copy may be above its own, so that what is left of the row when the
 * copy's share is taken back is not lost in that share's last bits: beyond, as with numbers that
 * are far too large, the row counts with the copy's.
 */
constexpr float kMostAbove = 5;

/** What rows lack that many have in common. */
enum class RowsLess : int {
  kNothing,
  kCommon,  // of a tail's copies: common()
  kBase     // of narrow rows: base(), and mean(i) of the keys around row i
};

/** Where in a row a lane's numbers of K and V begin, in bytes; negative: it has none. */
struct LaneNumbers {
  int key, value;
  int counted;  // of V, in the row's copy that has been counted: see Counted
};

/**
 * Of two rows, the copies in 8 bits that they have been counted by, if any: a lane's numbers of
 * their V, asked for ahead.
 */
template <int kWords>
struct Counted {
  static constexpr int kEach = (kWords + 3) / 4;

  bool has[2];
  uint32_t words[2][kEach];
  float scale;  // of this lane's row

  template <typename Address>
  __device__ __forceinline__ Counted(const Address& address, const int (&rows)[2], bool both,
                                     const LaneNumbers& mine, const AttendShape& shape) {
    const int values = NarrowReader<float>::value_offset(shape.key_dim);
    scale = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const char* copy = row == 0 || both ? address.counted(rows[row]) : nullptr;
      has[row] = copy != nullptr;
      if (has[row] && lane_id() / 16 == row) {
        scale = NarrowReader<float>::scale(copy + values, shape.value_dim);
      }
      const char* from = copy + values + mine.counted;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        uint32_t word = 0;
        if (has[row] && mine.counted >= 0) {
          word = kWords == 2 ? *reinterpret_cast<const uint16_t*>(from)
                             : reinterpret_cast<const uint32_t*>(from)[i];
        }
        words[row][i] = around_middle(word);
      }
    }
  }
  /**
   * @param share   that this lane's row has been counted with, of this lane's head
   * @param common  of the copies
   * @param first   the first of this lane's numbers
   */
  __device__ __forceinline__ void take_back(float share, const CommonRows& common, int first,
                                            Running<kWords>& running) const {
    if (!has[0] && !has[1]) return;
    const float scaled = share == 0 ? 0.0f : share * scale;  // which may be no number
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (!has[row]) continue;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const bool there = first >= 0;
        const float centre = there ? common.value_centre()[first + i] : 0.0f;
        const float unit = there ? common.value_unit()[first + i] : 1.0f;
        const float x = byte_to_float(words[row][i / 4], i % 4) * unit;
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const float of_copy = __shfl_sync(~0u, scaled, 16 * row + 4 * h);
          const float of_centre = __shfl_sync(~0u, share, 16 * row + 4 * h);
          const float left = __fmaf_rn(-of_copy, x, running.weighted[h][i]);
          running.weighted[h][i] = __fmaf_rn(-of_centre, centre, left);
        }
      }
    }
  }
};

/** In the place of what is asked for ahead, where there is nothing of it. */
struct NothingAhead {
  template <typename... Any>
  __device__ __forceinline__ explicit NothingAhead(const Any&...) {}
};

/** Of two narrow rows, the means of the keys around them: a lane's numbers, asked for ahead. */
template <int kWords>
struct Means {
  using Numbers = uint32_t[(kWords + 3) / 4];
  Numbers levels[2];
  float steps[2];  // 0: the row has no mean

  template <typename Address>
  __device__ __forceinline__ Means(const Address& address, const int (&rows)[2], bool both,
                                   const LaneNumbers& mine) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      decltype(address.mean(0)) mean{};
      if (mine.key >= 0 && (row == 0 || both) && address.base().any()) {
        mean = address.mean(rows[row]);
      }
      steps[row] = mean.step;
      const auto* from = mean.levels + mine.key;
#pragma unroll
      for (int i = 0; i < (kWords + 3) / 4; ++i) {
        uint32_t word = 0;
        if (mean.levels != nullptr) {
          word = kWords == 2 ? *reinterpret_cast<const uint16_t*>(from)
                             : reinterpret_cast<const uint32_t*>(from)[i];
        }
        levels[row][i] = around_middle(word);
      }
    }
  }
};

/** A lane's numbers of a narrow K, as queries that have its balance meet them: less the centre. */
template <typename Reader, int kWords>
__device__ __forceinline__ void whole_key(const Means<kWords>& means, int row, const char* from,
                                          const AttendShape& shape, float (&x)[kWords]) {
  const float scale = fabsf(Reader::scale(from, shape.key_dim));
  const float step = Reader::is_bare(from, shape.key_dim) ? 0.0f : means.steps[row];
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = __fmul_rn(x[i], scale);
  if (step == 0) return;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    x[i] = __fmaf_rn(byte_to_float(means.levels[row][i / 4], i % 4), step, x[i]);
  }
}

/** A lane's numbers of a narrow V, as they count. */
template <int kWords, typename Address>
__device__ __forceinline__ void whole_value(const Address& address, const char* from,
                                            const LaneNumbers& mine, const AttendShape& shape,
                                            float (&x)[kWords]) {
  using Reader = typename Address::Reader;
  const float scale = Reader::scale(from + Reader::value_offset(shape.key_dim), shape.value_dim);
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = __fmul_rn(x[i], scale);
  const auto& base = address.base();
  if (!base.any()) return;
  const auto values = base.values();
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int d = mine.counted + i;
    x[i] = __fmaf_rn(x[i], values.unit[d], values.centre[d]);
  }
}

/**
 * Two rows more, or one.
 * @param rows   their numbers
 * @param head   of this lane
 * @param moved  the shift of its logits, where rows lack something
 */
template <int kWords, typename Address>
__device__ __forceinline__ void attend_pair(const float (&query)[4][kWords], const char* first,
                                            const char* second, bool both, const Address& address,
                                            const int (&rows)[2], int head, float moved,
                                            const LaneNumbers& mine, const AttendShape& shape,
                                            Running<kWords>& running) {
  using Reader = typename Address::Reader;
  constexpr bool kBased = Address::kLess == RowsLess::kBase;
  const std::conditional_t<kBased, Means<kWords>, NothingAhead> means(address, rows, both, mine);
  const std::conditional_t<Address::kCounted, Counted<kWords>, NothingAhead> counted(
      address, rows, both, mine, shape);
  float x[kWords] = {}, y[kWords] = {}, dots[8];
  if (mine.key >= 0) Reader::floats(first + mine.key, x);
  if (mine.key >= 0 && both) Reader::floats(second + mine.key, y);
  if constexpr (kBased) {
    if (mine.key >= 0) whole_key<Reader>(means, 0, first, shape, x);
    if (mine.key >= 0 && both) whole_key<Reader>(means, 1, second, shape, y);
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    dots[h] = dots[4 + h] = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      dots[h] = __fmaf_rn(query[h][i], x[i], dots[h]);
      dots[4 + h] = __fmaf_rn(query[h][i], y[i], dots[4 + h]);
    }
  }
  // Eight sums over 32 lanes: each exchange halves how many a lane is left with. A lane ends with
  // row lane / 16, head (lane / 4) % 4.
  const int lane = lane_id(), row = rows[lane / 16];  // of this lane
#pragma unroll
  for (int width = 4, step = 16; width >= 1; width /= 2, step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float give = upper ? dots[i] : dots[i + width];
      const float own = upper ? dots[i + width] : dots[i];
      dots[i] = own + __shfl_xor_sync(~0u, give, step);
    }
  }
  float logit = dots[0] + __shfl_xor_sync(~0u, dots[0], 2);
  logit = logit + __shfl_xor_sync(~0u, logit, 1);
  float2 scales;  // of this lane's row
  if constexpr (Reader::kScaled && !kBased) {
    scales = Reader::scales(lane < 16 ? first : second, shape.key_dim, shape.value_dim);
    logit = logit * scales.x;
  }
  logit = logit * shape.scale;
  if constexpr (kBased) {
    if (Reader::is_bare(lane < 16 ? first : second, shape.key_dim)) moved = 0;
  }
  if constexpr (Address::kLess != RowsLess::kNothing) logit = logit + moved;
  logit = soft_capped(logit, shape.softcap);
  const bool there = both || lane < 16;
  logit = there ? address.noted(row, head, logit) : -infinity();
  float logit_before = -infinity();
  if constexpr (Address::kCounted) {
    if (there) logit_before = address.logit_before(row, head);
    if (logit_before > logit + kMostAbove) logit = logit_before;
  }

  // fmaxf leaves NaN out of the maximum, the sum keeps it.
  const float top = fmaxf(running.maximum, fmaxf(logit, __shfl_xor_sync(~0u, logit, 16)));
  const float shift = top == -infinity() ? 0.0f : top;
  const float rescale = exp_of(running.maximum - shift);
  float weight = exp_of(logit - shift), before = 0;
  if constexpr (Address::kCounted) {
    // Without a tail the weight is no number.
    if (logit_before > -infinity()) before = address.weight_before() * exp_of(logit_before - shift);
  }
  const float counts = weight - before;
  running.maximum = top;
  running.sum = __fmaf_rn(running.sum, rescale, counts + __shfl_xor_sync(~0u, counts, 16));
  // The scale of a row that does not count may be no number.
  if constexpr (Reader::kScaled && !kBased) weight = weight == 0 ? 0.0f : weight * scales.y;

  if (mine.value >= 0) Reader::floats(first + mine.value, x);
  if (mine.value >= 0 && both) Reader::floats(second + mine.value, y);
  if constexpr (kBased) {
    if (mine.value >= 0) whole_value(address, first, mine, shape, x);
    if (mine.value >= 0 && both) whole_value(address, second, mine, shape, y);
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const float rescale_h = __shfl_sync(~0u, rescale, 4 * h);
    const float first_weight = __shfl_sync(~0u, weight, 4 * h);
    const float second_weight = __shfl_sync(~0u, weight, 16 + 4 * h);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float sum = __fmul_rn(running.weighted[h][i], rescale_h);
      sum = __fmaf_rn(first_weight, x[i], sum);
      running.weighted[h][i] = both ? __fmaf_rn(second_weight, y[i], sum) : sum;
    }
  }
  if constexpr (Address::kCounted) {
    counted.take_back(before, address.common(), mine.counted, running);
  }
}

}  // namespace pariskv::cuda::device
