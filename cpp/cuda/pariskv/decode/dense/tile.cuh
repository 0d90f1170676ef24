/**
 * A warp's attention to tiles of rows in shared memory, on the tensor cores: a running softmax of
 * four query heads at a time; weights are in two terms (device/direct_rows.cuh).
 */
#pragma once

#include "device/direct_rows.cuh"
#include "pariskv/decode/dense/work.cuh"

namespace pariskv::cuda {

/** A row in shared memory is followed by a gap, so that neighbours begin in different banks. */
__host__ __device__ constexpr int dense_pitch(int row_bytes) { return row_bytes + 16; }

/** @tparam kWords  32 kWords dimensions of keys, and of values, at most; or `kExact` so many */
template <typename Element, int kWords, bool kExact>
struct DenseRows {
  static constexpr int kSteps = 2 * kWords;  // of 16 dimensions

  static __device__ __forceinline__ int key_dim(const device::AttendShape& shape) {
    return kExact ? 32 * kWords : shape.key_dim;
  }
  static __device__ __forceinline__ int value_dim(const device::AttendShape& shape) {
    return kExact ? 32 * kWords : shape.value_dim;
  }

  /** Two numbers of a query, as a product takes them; zeros where there are none. */
  static __device__ __forceinline__ uint32_t query_pair(const Element* query, bool there, int d,
                                                        const device::AttendShape& shape) {
    if (!there || d >= key_dim(shape)) return 0;
    return device::element_bits(query[d]) | uint32_t(device::element_bits(query[d + 1])) << 16;
  }

  /**
   * The keys of a tile, for each eight rows and 16 dimensions.
   * @param multiply  multiply(dots[run], c, lower, upper): rows 8 run on, dimensions 16 c on
   */
  template <typename Multiply>
  static __device__ __forceinline__ void multiply_keys(uint32_t tile, int pitch,
                                                       const device::AttendShape& shape,
                                                       float (&dots)[2][4], Multiply multiply) {
    const int lane = device::lane_id();
#pragma unroll
    for (int c = 0; c < kSteps; c += 2) {
      if (16 * c >= key_dim(shape)) break;
      const bool both = 16 * c + 16 < key_dim(shape);
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        // Lanes 8 i to 8 i + 7 give rows of dimensions 8 i to 8 i + 7.
        uint32_t keys[4];
        device::ptx::ldmatrix_x4(keys, tile + uint32_t((8 * run + lane % 8) * pitch + 32 * c +
                                                       16 * (both ? lane / 8 : lane / 8 % 2)));
        multiply(dots[run], c, keys[0], keys[1]);
        if (both) multiply(dots[run], c + 1, keys[2], keys[3]);
      }
    }
  }
  /** Where the values of a tile begin. */
  static __device__ __forceinline__ uint32_t values(uint32_t tile,
                                                    const device::AttendShape& shape) {
    return tile + 2 * uint32_t(key_dim(shape));
  }
  /** The logit of a row, of which `left` are there. */
  static __device__ __forceinline__ float logit(float dot, int row, int left,
                                                const device::AttendShape& shape) {
    return row < left ? device::soft_capped(dot * shape.scale, shape.softcap) : -device::infinity();
  }
};

template <typename Element, int kWords, bool kExact>
class DenseTiles : DenseRows<Element, kWords, kExact> {
  using Rows = DenseRows<Element, kWords, kExact>;
  using Rows::kSteps, Rows::value_dim;

 public:
  /** Queries from `q` on, of `heads` of the four; the sums begin anew. */
  __device__ __forceinline__ void start(const Element* q, int64_t stride, int heads,
                                        const device::AttendShape& shape) {
    const int g = device::fragment_row(), t = device::fragment_pair();
    const bool there = g % device::kDirectHeads < heads;
    const Element* own = q + (g % device::kDirectHeads) * stride;
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        queries_[c][half] = Rows::query_pair(own, there, 16 * c + 8 * half + 2 * t, shape);
      }
    }
  }
  __device__ __forceinline__ void begin() {
    sums_ = {-device::infinity(), 0};
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
    const int t = device::fragment_pair(), lane = device::lane_id();
    float dots[2][4] = {};
    Rows::multiply_keys(tile, pitch, shape, dots,
                        [&](float (&sums)[4], int c, uint32_t lower, uint32_t upper) {
                          const uint32_t own[4] = {queries_[c][0], 0, queries_[c][1], 0};
                          device::multiply<Element>(sums, own, lower, upper);
                        });
    float2 logits[2];
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const int row = 8 * run + 2 * t;
      logits[run] = {Rows::logit(dots[run][0], row, left, shape),
                     Rows::logit(dots[run][1], row + 1, left, shape)};
    }
    // fmaxf leaves NaN out of the maximum, the sum keeps it.
    const float top = fmaxf(fmaxf(logits[0].x, logits[0].y), fmaxf(logits[1].x, logits[1].y));
    float shift;
    const float rescale = device::raise_to(fmaxf(top, sums_.maximum), sums_, shift);
    if (__any_sync(~0u, rescale != 1)) {
      const device::ColumnScales scales(rescale);
#pragma unroll
      for (auto& of_step : weighted_) scales.apply(of_step);
    }
    const uint32_t lower = device::weigh<Element>(logits[0], shift, sums_);
    const uint32_t upper = device::weigh<Element>(logits[1], shift, sums_);
    const uint32_t values = Rows::values(tile, shape);
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if (16 * c >= value_dim(shape)) break;
      // Blocks of 8 dimensions and 8 rows: both of dimensions first.
      uint32_t block[4];
      device::ptx::ldmatrix_x4_trans(block, values + uint32_t((lane % 8 + 8 * (lane / 16)) * pitch +
                                                              32 * c + 16 * (lane / 8 % 2)));
      device::multiply<Element>(weighted_[c], block, lower, upper);
    }
  }

  /**
   * The sums of all tiles: for each of four heads maximum, sum, weighted values, `step` floats
   * apart, of which the first `heads` are written.
   */
  __device__ __forceinline__ void leave(float* out, int step, int /*first*/, int heads,
                                        const device::AttendShape& shape) const {
    const int g = device::fragment_row(), t = device::fragment_pair();
    const float sum = device::sum_of_head(sums_.sum);
    if (t == 0 && g < heads) {
      out[g * step] = sums_.maximum;
      out[g * step + 1] = sum;
    }
    const bool second = device::joins_second();
    const int head = 2 * (t % 2) + second;
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if (16 * c >= value_dim(shape)) break;
      const float2 pair = device::join_columns(weighted_[c], second);
      if (head >= heads) continue;
      out[head * step + 2 + 16 * c + g] = pair.x;
      out[head * step + 2 + 16 * c + 8 + g] = pair.y;
    }
  }

 private:
  struct Sums {
    float maximum, sum;  // of head g % 4; the sum of this lane's rows
  };
  uint32_t queries_[kSteps][2];
  float weighted_[kSteps][4];
  Sums sums_;
};

}  // namespace pariskv::cuda
