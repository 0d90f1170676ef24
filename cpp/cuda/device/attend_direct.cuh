/**
 * Attention of the query heads of one kv head over rows in device memory, for 16-bit elements, on
 * the tensor cores: rows come from memory straight into the registers of the warp that needs them,
 * as the instructions want them, and many are on their way at once. Made for few rows and little
 * time.
 *
 * Rows are cut into kParts parts, as in attend.cuh, and a part into runs of eight, which the warps
 * take in turns. What a part leaves is the same: maximum, sum, weighted values.
 */
#pragma once

#include "device/attend.cuh"
#include "device/matrix.cuh"

namespace pariskv::cuda::device {

/** Query heads of a pass: the columns of an instruction are theirs, once for each term. */
constexpr int kDirectHeads = 4;

template <int kWords>
struct DirectShape {
  static constexpr int kHalves = kWords == 8 ? 2 : 1;  // warps that share rows, by dimensions
  static constexpr int kStrands = kWarps / kHalves;
  static constexpr int kRows = 8 * kStrands;           // of a block at a time
  static constexpr int kTiles = 2 * kWords / kHalves;  // of 16 dimensions, of a warp
  static constexpr int kOfLane = 2 * kTiles;           // neighbouring dimensions
  static constexpr int kPieces = kOfLane / 8;          // 16 bytes each
  // Where strands are put together: padded so that eight lanes meet all banks.
  static constexpr int kOfLanePadded = kOfLane + 4;
  static constexpr int kFloats = 8 * kOfLanePadded + 8;
};

template <int kWords, typename Element>
struct DirectSpace {
  alignas(16) Element query[kDirectHeads][32 * kWords + 32];
  alignas(16) Element fresh[2][32 * kWords];  // K and V of the new row
  float maximum[kWarps][kDirectHeads], sum[kWarps][kDirectHeads];
  alignas(16) float weighted[kWarps][kDirectHeads][DirectShape<kWords>::kFloats];
};

template <int kWords, typename Element, typename Address>
class DirectAttention {
 public:
  /** @param address  address(i) is where row i lies; not asked for the new row */
  __device__ __forceinline__ DirectAttention(const AttendShape& shape, const Cluster& cluster,
                                             DirectSpace<kWords, Element>& space, int rows,
                                             const NewRow<Element>& new_row, Address address)
      : shape_(shape),
        cluster_(cluster),
        space_(space),
        rows_(rows),
        new_row_(new_row),
        address_(address) {}

  /**
   * All heads of the group, some at a time. Ends with a barrier.
   * @param q    (group, head_dim), `stride` elements apart
   * @param out  (kParts, group, 2 + head_dim)
   */
  __device__ __forceinline__ void run(const Element* q, int64_t stride, float* out) {
#pragma unroll 1
    for (int first_head = 0; first_head < shape_.group; first_head += kDirectHeads) {
#pragma unroll 1
      for (int part = cluster_.first_part(); part < cluster_.end_part(); ++part) {
        const int begin = part_begin(rows_, part), end = part_begin(rows_, part + 1);
        Place place = find(begin, end);
        if (part == cluster_.first_part()) {
          stage(q + first_head * stride, stride, first_head);
          __syncthreads();
        }
        clear();
#pragma unroll 1
        for (int row = begin; row < end; row += Shape::kRows) {
          const Place now = place;
          place = find(row + Shape::kRows, end);
          if (8 * strand() < end - row) add(now, end - row, row != begin);
        }
        put_together(first_head, out + int64_t(part) * shape_.group * (2 + shape_.head_dim));
      }
    }
  }

 private:
  using Shape = DirectShape<kWords>;

  __device__ __forceinline__ static int g() { return lane_id() / 4; }
  __device__ __forceinline__ static int t() { return lane_id() % 4; }
  __device__ __forceinline__ static int strand() { return warp_id() / Shape::kHalves; }
  __device__ __forceinline__ static int half() { return warp_id() % Shape::kHalves; }

  /** A row: null where there is none. */
  struct Place {
    const char *k, *v;
  };
  /** Row g of this warp's eight. */
  __device__ __forceinline__ Place find(int first, int end) const {
    const int row = first + 8 * strand() + g();
    if (row >= end) return {nullptr, nullptr};
    if (new_row_.k != nullptr && row == new_row_.index) {
      return {reinterpret_cast<const char*>(space_.fresh[0]),
              reinterpret_cast<const char*>(space_.fresh[1])};
    }
    const char* k = address_(row);
    return {k, k + shape_.row_bytes / 2};
  }

  /** Queries and the new row, which may lie anyhow, to where they are read in pieces. */
  __device__ __forceinline__ void stage(const Element* q, int64_t stride, int first_head) {
    constexpr int kDim = 32 * kWords;
    for (int i = int(threadIdx.x); i < kDirectHeads * kDim; i += kThreads) {
      const int head = i / kDim, d = i % kDim;
      const bool there = first_head + head < shape_.group && d < shape_.head_dim;
      space_.query[head][d] = there ? q[head * stride + d] : from_float<Element>(0);
    }
    if (new_row_.k == nullptr) return;
    for (int d = int(threadIdx.x); d < shape_.head_dim; d += kThreads) {
      space_.fresh[0][d] = new_row_.k[d];
      space_.fresh[1][d] = new_row_.v[d];
    }
  }

  __device__ __forceinline__ void clear() {
    maximum_ = -infinity();
    sum_ = 0;
#pragma unroll
    for (int j = 0; j < Shape::kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weighted_[j][i] = 0;
    }
  }

  /** Piece `i` of a row, zeros where it has none. */
  __device__ __forceinline__ uint4 piece(const char* row, int i) const {
    if (row == nullptr || 8 * i >= shape_.head_dim) return make_uint4(0, 0, 0, 0);
    return reinterpret_cast<const uint4*>(row)[i];
  }

  /** Eight rows of this warp; the block has `left` of them from its first one on. */
  __device__ __forceinline__ void add(const Place& place, int left, bool more) {
    // Lane 4 g + t reads of row g the pieces t, t + 4, ..., and its dimensions of rows 2 t and
    // 2 t + 1.
    uint4 keys[kWords], values[2][Shape::kPieces];
#pragma unroll
    for (int c = 0; c < kWords; ++c) keys[c] = piece(place.k, 4 * c + t());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto row = reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(place.v), 8 * t() + 4 * i));
#pragma unroll
      for (int p = 0; p < Shape::kPieces; ++p) {
        values[i][p] = piece(row, Shape::kPieces * (8 * half() + g()) + p);
      }
    }

    // Queries times keys. Heads come twice, in rows g and g + 4: so a lane has the logits of head
    // g % 4, rows 2 t and 2 t + 1.
    float dots[2][4] = {};
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
      const uint4 query =
          *reinterpret_cast<const uint4*>(&space_.query[g() % kDirectHeads][8 * (4 * c + t())]);
      const uint32_t lower[4] = {query.x, 0, query.y, 0}, upper[4] = {query.z, 0, query.w, 0};
      multiply<Element>(dots[0], lower, keys[c].x, keys[c].y);
      multiply<Element>(dots[1], upper, keys[c].z, keys[c].w);
    }
    const int first = 8 * strand() + 2 * t();
    float logits[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float logit = soft_capped((dots[0][i] + dots[1][i]) * shape_.scale, shape_.softcap);
      logits[i] = first + i < left ? logit : -infinity();
    }
    // fmaxf leaves NaN out of the maximum, the sum keeps it.
    float top = fmaxf(maximum_, fmaxf(logits[0], logits[1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float shift = top == -infinity() ? 0.0f : top;
    const float keep = exp_of(maximum_ - shift);
    const float weights[2] = {exp_of(logits[0] - shift), exp_of(logits[1] - shift)};
    maximum_ = top;
    sum_ = __fmaf_rn(sum_, keep, weights[0] + weights[1]);
    if (more) {
      const float even = __shfl_sync(~0u, keep, 8 * (t() % 2));
      const float odd = __shfl_sync(~0u, keep, 8 * (t() % 2) + 4);
#pragma unroll
      for (int j = 0; j < Shape::kTiles; ++j) {
        weighted_[j][0] *= even, weighted_[j][1] *= odd;
        weighted_[j][2] *= even, weighted_[j][3] *= odd;
      }
    }

    // Values times weights, the latter in two terms: column g is the first of head g, or the
    // second of head g - 4.
    uint32_t rest;
    const uint32_t whole = pack<Element>(weights[0], weights[1], rest);
    const uint32_t column = g() < kDirectHeads ? whole : rest;
#pragma unroll
    for (int j = 0; j < Shape::kTiles; ++j) {
      const uint32_t a = word(values[0][j / 4], j % 4), b = word(values[1][j / 4], j % 4);
      multiply<Element>(weighted_[j], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), column);
    }
  }
  __device__ __forceinline__ static uint32_t word(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
  }

  /** Strands of a part, in order. Ends with a barrier. */
  __device__ __forceinline__ void put_together(int first_head, float* out) {
    sum_ += __shfl_xor_sync(~0u, sum_, 1);
    sum_ += __shfl_xor_sync(~0u, sum_, 2);
    if (t() == 0 && g() < kDirectHeads) {
      space_.maximum[warp_id()][g()] = maximum_;
      space_.sum[warp_id()][g()] = sum_;
    }
    // Both terms of a head together: a lane is left with one of its two columns.
    const bool second = t() >= 2;
    const int column = 2 * (t() % 2) + second;
    float* place = &space_.weighted[warp_id()][column][g() * Shape::kOfLanePadded];
#pragma unroll
    for (int j = 0; j < Shape::kTiles; j += 2) {
      float of[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&sums)[4] = weighted_[j + i / 2];
        const float own = sums[2 * (i % 2) + 0], other = sums[2 * (i % 2) + 1];
        of[i] = (second ? other : own) + __shfl_xor_sync(~0u, second ? own : other, 2);
      }
      *reinterpret_cast<float4*>(place + 2 * j) = make_float4(of[0], of[1], of[2], of[3]);
    }
    __syncthreads();
    constexpr int kPairs = 16 * kWords;  // of dimensions
#pragma unroll 1
    for (int i = int(threadIdx.x); i < kDirectHeads * kPairs; i += kThreads) {
      const int head = i / kPairs, d = 2 * (i % kPairs);
      if (first_head + head >= shape_.group || d >= shape_.head_dim) continue;
      const int of_half = d / (8 * Shape::kOfLane), in_half = d % (8 * Shape::kOfLane);
      const int at = in_half / Shape::kOfLane * Shape::kOfLanePadded + in_half % Shape::kOfLane;
      float maximum[Shape::kStrands], top = -infinity();
#pragma unroll
      for (int s = 0; s < Shape::kStrands; ++s) {
        maximum[s] = space_.maximum[s * Shape::kHalves][head];
        top = fmaxf(top, maximum[s]);
      }
      const float shift = top == -infinity() ? 0.0f : top;
      float sum = 0;
      float2 weighted = make_float2(0, 0);
#pragma unroll
      for (int s = 0; s < Shape::kStrands; ++s) {
        const float factor = exp_of(maximum[s] - shift);
        const float2 of = *reinterpret_cast<const float2*>(
            &space_.weighted[s * Shape::kHalves + of_half][head][at]);
        sum = __fmaf_rn(space_.sum[s * Shape::kHalves][head], factor, sum);
        weighted.x = __fmaf_rn(of.x, factor, weighted.x);
        weighted.y = __fmaf_rn(of.y, factor, weighted.y);
      }
      float* to = out + (first_head + head) * (2 + shape_.head_dim);
      if (d == 0) *reinterpret_cast<float2*>(to) = make_float2(top, sum);
      *reinterpret_cast<float2*>(to + 2 + d) = weighted;
    }
    __syncthreads();
  }

  const AttendShape& shape_;
  const Cluster& cluster_;
  DirectSpace<kWords, Element>& space_;
  int rows_;
  NewRow<Element> new_row_;
  Address address_;
  float maximum_, sum_;  // of head g % 4; the sum of this lane's rows
  float weighted_[Shape::kTiles][4];
};

}  // namespace pariskv::cuda::device
