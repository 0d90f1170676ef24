/**
 * Attention of the query heads of one kv head over rows in device memory, for 16-bit elements, on
 * the tensor cores: rows come from memory straight into the registers of the warp that needs them,
 * as the instructions want them, and many are on their way at once. Made for few rows and little
 * time.
 *
 * Rows are cut into kParts parts, as in attend.cuh, and a part into runs of eight. A block with few
 * parts takes them one by one: its warps share the runs of a part, and then the dimensions. One
 * with many has a warp for each. The sums are the same bits. What a part leaves is as there:
 * maximum, sum, weighted values.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/direct_rows.cuh"

namespace pariskv::cuda::device {

/** Runs of eight rows that are looked at in one step: of all warps, and of each. */
constexpr int kRuns = 8, kRunsOfWarp = kRuns / kDirectWarps;
constexpr int kStepRows = 8 * kRuns;

/** The new row, as a stored one, comes after it. */
template <int kWords, typename Element>
struct DirectSpace {
  alignas(16) DirectQueries<kWords, Element> query;
  const char* rows[kDirectWarps][kStepRows];  // of a step: null where there is none
  float2 logits[kDirectWarps][kRuns][16];     // lane 4 g + t: of head g, rows 2 t and 2 t + 1
};

/** A running softmax of four heads. */
struct DirectSums {
  float maximum, sum;  // of head g % 4; the sum of this lane's rows
};

template <int kWords, typename Element, typename Address>
class DirectAttention {
  using Reader = typename Address::Reader;

 public:
  using Space = DirectSpace<kWords, Element>;

  /** @param address  as for RowAttention: Reader, where rows lie */
  __device__ __forceinline__ DirectAttention(const AttendShape& shape, const Cluster& cluster,
                                             Space& space, int rows, const NewRow<Element>& new_row,
                                             Address address)
      : shape_(shape),
        cluster_(cluster),
        space_(space),
        rows_(rows),
        new_row_(new_row),
        address_(address) {}

  /**
   * All heads of the group, some at a time. A block that has `kMany` parts gives each to one warp.
   * @param q    (group, key_dim), `stride` elements apart
   * @param out  (kParts, group, 2 + value_dim)
   */
  template <bool kMany>
  __device__ __forceinline__ void run(const Element* q, int64_t stride, float* out) {
#pragma unroll 1
    for (int first_head = 0; first_head < shape_.group; first_head += kDirectHeads) {
      if (first_head > 0) __syncthreads();
      // Asked for ahead of the queries, so that this is one trip to memory.
      const int part = cluster_.first_part();
      const char* ahead = nullptr;
      if (!kMany && int(threadIdx.x) < kStepRows) {
        ahead = find(part_begin(rows_, part) + int(threadIdx.x), part_begin(rows_, part + 1));
      }
      stage(q + first_head * stride, stride, first_head);
      if (!kMany && int(threadIdx.x) < kStepRows) space_.rows[0][threadIdx.x] = ahead;
      if constexpr (kMany) {
        __syncthreads();
#pragma unroll 1
        for (int part = cluster_.first_part() + warp_id(); part < cluster_.end_part();
             part += kDirectWarps) {
#pragma unroll 1
          for (int first = 0; first < shape_.value_dim; first += 32 * kWords) {
            attend_alone(part, first_head, first, out + part_offset(part, first_head));
          }
        }
      } else {
#pragma unroll 1
        for (int part = cluster_.first_part(); part < cluster_.end_part(); ++part) {
#pragma unroll 1
          for (int first = 0; first < shape_.value_dim; first += 32 * kWords) {
            attend_together(part, first_head, first, part == cluster_.first_part() && first == 0,
                            out + part_offset(part, first_head));
          }
        }
      }
    }
  }

 private:
  /** Words of a row, two dimensions each, of a lane: alone, or where all warps share them. */
  static constexpr int kAlone = 2 * kWords;
  static constexpr int kShared = kAlone / kDirectWarps;

  __device__ __forceinline__ static int g() { return fragment_row(); }
  __device__ __forceinline__ static int t() { return fragment_pair(); }

  __device__ __forceinline__ int64_t part_offset(int part, int first_head) const {
    return (int64_t(part) * shape_.group + first_head) * (2 + shape_.value_dim);
  }

  /** Queries and the new row, which may lie anyhow, to where they are read in pieces. */
  __device__ __forceinline__ void stage(const Element* q, int64_t stride, int first_head) {
    // By different warps, so that both take one trip to memory.
    if (int(threadIdx.x) < kDirectThreads / 2) {
      stage_queries<kWords>(shape_, q, stride, first_head, space_.query);
    } else if (new_row_.k != nullptr) {
      stage_row<Reader>(shape_, new_row_, fresh());
    }
  }

  __device__ __forceinline__ char* fresh() const { return reinterpret_cast<char*>(&space_ + 1); }

  /** Where a row lies; null: there is none. */
  __device__ __forceinline__ const char* find(int row, int end) const {
    if (row >= end) return nullptr;
    const bool is_new = new_row_.k != nullptr && row == new_row_.index;
    return is_new ? fresh() : address_(row);
  }

  /** Logits of eight rows, of which `left` are there: of head g % 4, rows 2 t and 2 t + 1. */
  __device__ __forceinline__ float2 look_at(const char* const* rows, int left) const {
    // Lane 4 g + t reads of row g the pieces t, t + 4, ...
    const char* row = rows[g()];
    typename Reader::Piece keys[kWords];
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
      const int i = 4 * c + t();
      const bool there = row != nullptr && 8 * i < shape_.key_dim;
      keys[c] = there ? Reader::piece(row, 8 * i) : typename Reader::Piece{};
    }
    float2 logits = logits_of<kWords, Element, Reader>(space_.query, keys, shape_);
    if (2 * t() >= left) logits.x = -infinity();
    if (2 * t() + 1 >= left) logits.y = -infinity();
    return logits;
  }

  __device__ __forceinline__ static int place_of_logits() { return lane_id() % 16; }

  /** The step's maximum joins; returns what sums so far are to be multiplied with. */
  __device__ __forceinline__ static float raise(const float2 (&logits)[kRuns][16], int runs,
                                                DirectSums& sums, float& shift) {
    // fmaxf leaves NaN out of the maximum, the sum keeps it.
    float top = sums.maximum;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (r >= runs) break;
      const float2 pair = logits[r][place_of_logits()];
      top = fmaxf(top, fmaxf(pair.x, pair.y));
    }
    return raise_to(top, sums, shift);
  }

  template <int kCount>
  using Values = typename Reader::template Operands<kCount>;

  /** Weighted values of 2 kCount neighbouring dimensions of a lane. */
  template <int kCount>
  struct Weighted {
    float of[kCount][4] = {};

    __device__ __forceinline__ void scale(float rescale) {
      const ColumnScales scales(rescale);
#pragma unroll
      for (int j = 0; j < kCount; ++j) scales.apply(of[j]);
    }
    /** Words of rows 2 t and 2 t + 1 of a run. */
    __device__ __forceinline__ void add(const Values<kCount>& a, const Values<kCount>& b,
                                        uint32_t weights) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint32_t one = a.word(j), other = b.word(j);
        multiply<Element>(of[j], __byte_perm(one, other, 0x5410), __byte_perm(one, other, 0x7632),
                          weights);
      }
    }
  };

  /** This lane's numbers of a row's values, from dimension `first` on. */
  template <int kCount>
  __device__ __forceinline__ void load_values(const char* row, int first,
                                              Values<kCount>& values) const {
    Reader::load(row + Reader::value_offset(shape_.key_dim), first,
                 row == nullptr ? 0 : shape_.value_dim, values);
  }

  /** What a part leaves of this lane's dimensions, from `first` on; sums by who is `to_sum`. */
  template <int kCount>
  __device__ __forceinline__ void leave(const Weighted<kCount>& weighted, DirectSums sums,
                                        int first_head, int first, bool to_sum, float* out) const {
    const int heads = min(shape_.group - first_head, kDirectHeads), step = 2 + shape_.value_dim;
    sums.sum = sum_of_head(sums.sum);
    if (to_sum && t() == 0 && g() < heads) {
      *reinterpret_cast<float2*>(out + g() * step) = make_float2(sums.maximum, sums.sum);
    }
    const bool second = joins_second();
    const int head = 2 * (t() % 2) + second;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float2 pair = join_columns(weighted.of[j], second);
      if (head >= heads || first + 2 * j >= shape_.value_dim) continue;
      *reinterpret_cast<float2*>(out + head * step + 2 + first + 2 * j) = pair;
    }
  }

  /**
   * A part by all warps, for 32 kWords dimensions of values from `first_value` on. Where rows of
   * its first step lie may be `known`.
   */
  __device__ __forceinline__ void attend_together(int part, int first_head, int first_value,
                                                  bool known, float* out) const {
    const int begin = part_begin(rows_, part), end = part_begin(rows_, part + 1);
    const int warp = warp_id(), first_dim = first_value + 2 * kShared * (8 * warp + g());
    auto& rows = space_.rows[0];
    auto& logits = space_.logits[0];
    DirectSums sums{-infinity(), 0};
    Weighted<kShared> weighted;
#pragma unroll 1
    for (int first = begin; first < end; first += kStepRows) {
      const int left = end - first, runs = min((left + 7) / 8, kRuns);
      if (int(threadIdx.x) < kStepRows && !(known && first == begin)) {
        rows[threadIdx.x] = find(first + int(threadIdx.x), end);
      }
      __syncthreads();
      // Values are asked for with the keys.
      Values<kShared> values[kRuns][2] = {};
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        if (r >= runs) break;
        load_values(rows[8 * r + 2 * t()], first_dim, values[r][0]);
        load_values(rows[8 * r + 2 * t() + 1], first_dim, values[r][1]);
      }
      float2 pairs[kRunsOfWarp];
#pragma unroll
      for (int i = 0; i < kRunsOfWarp; ++i) {
        const int r = warp + kDirectWarps * i;
        pairs[i] = look_at(rows + 8 * r, left - 8 * r);
      }
#pragma unroll
      for (int i = 0; i < kRunsOfWarp; ++i) {
        if (g() < kDirectHeads) logits[warp + kDirectWarps * i][place_of_logits()] = pairs[i];
      }
      __syncthreads();
      float shift;
      const float rescale = raise(logits, runs, sums, shift);
      if (first != begin) weighted.scale(rescale);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        if (r >= runs) break;
        const uint32_t column = weigh<Element>(logits[r][place_of_logits()], shift, sums);
        weighted.add(values[r][0], values[r][1], column);
      }
    }
    leave(weighted, sums, first_head, first_dim, warp == 0 && first_value == 0, out);
  }

  /** The same by one warp. */
  __device__ __forceinline__ void attend_alone(int part, int first_head, int first_value,
                                               float* out) const {
    const int begin = part_begin(rows_, part), end = part_begin(rows_, part + 1);
    const int first_dim = first_value + 2 * kAlone * g();
    auto& rows = space_.rows[warp_id()];
    auto& logits = space_.logits[warp_id()];
    DirectSums sums{-infinity(), 0};
    Weighted<kAlone> weighted;
#pragma unroll 1
    for (int first = begin; first < end; first += kStepRows) {
      const int left = end - first, runs = min((left + 7) / 8, kRuns);
      __syncwarp();
      for (int i = lane_id(); i < kStepRows; i += 32) rows[i] = find(first + i, end);
      __syncwarp();
      // Two runs at a time, so that both are on their way at once; the second may have no rows.
#pragma unroll 1
      for (int r = 0; r < runs; r += 2) {
        const float2 one = look_at(rows + 8 * r, left - 8 * r);
        const float2 other = look_at(rows + 8 * r + 8, left - 8 * r - 8);
        if (g() < kDirectHeads) {
          logits[r][place_of_logits()] = one;
          logits[r + 1][place_of_logits()] = other;
        }
      }
      __syncwarp();
      float shift;
      const float rescale = raise(logits, runs, sums, shift);
      if (first != begin) weighted.scale(rescale);
#pragma unroll 2
      for (int r = 0; r < runs; ++r) {
        Values<kAlone> values[2];
        load_values(rows[8 * r + 2 * t()], first_dim, values[0]);
        load_values(rows[8 * r + 2 * t() + 1], first_dim, values[1]);
        const uint32_t column = weigh<Element>(logits[r][place_of_logits()], shift, sums);
        weighted.add(values[0], values[1], column);
      }
    }
    leave(weighted, sums, first_head, first_dim, first_value == 0, out);
  }

  const AttendShape& shape_;
  const Cluster& cluster_;
  Space& space_;
  int rows_;
  NewRow<Element> new_row_;
  Address address_;
};

}  // namespace pariskv::cuda::device
