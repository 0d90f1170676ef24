/**
 * The same for more query heads than four: heads are rows of the products, so keys and values are
 * read once for all of them. Up to eight heads leave half of the rows to the second terms of their
 * weights; of more heads the second terms are a product of their own.
 */
#pragma once

#include "pariskv/decode/dense/tile.cuh"

namespace pariskv::cuda {

/**
 * @tparam kWords  32 kWords dimensions of keys, and of values, at most; or `kExact` so many
 * @tparam kHeads  8 or 16
 */
template <typename Element, int kWords, int kHeads, bool kExact>
class WideTiles : DenseRows<Element, kWords, kExact> {
  using Rows = DenseRows<Element, kWords, kExact>;
  using Rows::kSteps, Rows::value_dim;
  static constexpr int kHalves = kHeads / 8;  // query heads of a lane: g, and g + 8

 public:
  /** Queries of `heads` heads from `q` on. */
  __device__ __forceinline__ void start(const Element* q, int64_t stride, int heads,
                                        const device::AttendShape& shape) {
    const int g = device::fragment_row(), t = device::fragment_pair();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const bool there = g + 8 * half < heads;
      const Element* own = q + (g + 8 * half) * stride;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        queries_[i / 2][i % 2][half] = Rows::query_pair(own, there, 8 * i + 2 * t, shape);
      }
    }
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (Sums& sums : sums_) sums = {-device::infinity(), 0};
#pragma unroll
    for (auto& of_step : weighted_) {
#pragma unroll
      for (float& sum : of_step) sum = 0;
    }
  }

  /**
   * A tile at a shared address, of which `left` rows are there; values of the rest are zeros.
   */
  __device__ __forceinline__ void add(uint32_t tile, int pitch, int left,
                                      const device::AttendShape& shape) {
    const int lane = device::lane_id();
    float dots[2][4] = {};
    Rows::multiply_keys(tile, pitch, shape, dots,
                        [&](float (&sums)[4], int c, uint32_t lower, uint32_t upper) {
                          multiply_queries(sums, c, lower, upper);
                        });
    uint32_t whole[4], rest[4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) weigh(half, dots, left, shape, whole, rest);
    if constexpr (kHalves == 1) whole[1] = rest[0], whole[3] = rest[2];
    const uint32_t values = Rows::values(tile, shape);
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if (16 * c >= value_dim(shape)) break;
      // Blocks of 8 rows and 8 dimensions: both of rows first.
      uint32_t block[4];
      device::ptx::ldmatrix_x4_trans(
          block, values + uint32_t(lane % 16 * pitch + 32 * c + 16 * (lane / 16)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float (&sums)[4] = weighted_[2 * c + i];
        device::multiply<Element>(sums, whole, block[2 * i], block[2 * i + 1]);
        if constexpr (kHalves == 2) {
          device::multiply<Element>(sums, rest, block[2 * i], block[2 * i + 1]);
        }
      }
    }
  }

  /**
   * The sums of all tiles: of four heads from `first` on maximum, sum, weighted values, `step`
   * floats apart, of which the first `heads` are written. All lanes, with the same `first`.
   */
  __device__ __forceinline__ void leave(float* out, int step, int first, int heads,
                                        const device::AttendShape& shape) const {
    const int g = device::fragment_row(), t = device::fragment_pair();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float sum = device::sum_of_head(sums_[half].sum);
      const int head = g + 8 * half - first;
      if (head < 0 || head >= heads) continue;
      float* own = out + head * step;
      if (t == 0) own[0] = sums_[half].maximum, own[1] = sum;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        if (8 * i >= value_dim(shape)) break;
        const float (&sums)[4] = weighted_[i];
        float2 pair = {sums[2 * half], sums[2 * half + 1]};
        if (kHalves == 1) pair.x += sums[2], pair.y += sums[3];  // their second terms
        *reinterpret_cast<float2*>(own + 2 + 8 * i + 2 * t) = pair;
      }
    }
  }

 private:
  struct Sums {
    float maximum, sum;  // of a head; the sum of this lane's rows
  };

  __device__ __forceinline__ void multiply_queries(float (&dots)[4], int c, uint32_t lower,
                                                   uint32_t upper) const {
    const uint32_t (&own)[2][kHalves] = queries_[c];
    const uint32_t a[4] = {own[0][0], kHalves == 1 ? 0 : own[0][kHalves - 1], own[1][0],
                           kHalves == 1 ? 0 : own[1][kHalves - 1]};
    device::multiply<Element>(dots, a, lower, upper);
  }

  /** Weights of a tile's rows for one of a lane's heads; what is there so far is rescaled. */
  __device__ __forceinline__ void weigh(int half, const float (&dots)[2][4], int left,
                                        const device::AttendShape& shape, uint32_t (&whole)[4],
                                        uint32_t (&rest)[4]) {
    float logits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * (i / 2) + 2 * device::fragment_pair() + i % 2;
      logits[i] = Rows::logit(dots[i / 2][2 * half + i % 2], row, left, shape);
    }
    Sums& sums = sums_[half];
    // fmaxf leaves NaN out of the maximum, the sum keeps it.
    const float top = fmaxf(fmaxf(logits[0], logits[1]), fmaxf(logits[2], logits[3]));
    float shift;
    const float rescale = device::raise_to(fmaxf(top, sums.maximum), sums, shift);
    if (__any_sync(~0u, rescale != 1)) {
#pragma unroll
      for (auto& of_step : weighted_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (kHalves == 1 || i / 2 == half) of_step[i] *= rescale;
        }
      }
    }
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const float a = device::exp_of(logits[2 * run] - shift);
      const float b = device::exp_of(logits[2 * run + 1] - shift);
      sums.sum = __fadd_rn(sums.sum, __fadd_rn(a, b));
      whole[2 * run + half] = device::pack<Element>(a, b, rest[2 * run + half]);
    }
  }

  uint32_t queries_[kSteps][2][kHalves];
  float weighted_[2 * kSteps][4];
  Sums sums_[kHalves];
};

}  // namespace pariskv::cuda
