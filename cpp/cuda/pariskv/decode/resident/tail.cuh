/**
 * Attention to the copies of a tail's rows (tail_copies.h), for 16-bit elements: their levels go to
 * the tensor cores as they are, in products of whole numbers. Queries have 24 bits there, in three
 * terms of 8, of their loudest channel: a huge key would show fewer. Weights have 16 of the head's
 * largest one in 64 rows.
 *
 * Of eight keys lane 4 g + t has row g, of logits those of head g % 4 and rows 2 t and 2 t + 1.
 * With these it has all weights of the same rows of four eights, as a product takes them, and of
 * their values whole words, four channels each. Parts are those of device/attend_direct.cuh.
 */
#pragma once

#include "device/attend_direct.cuh"
#include "pariskv/decode/context.cuh"

namespace pariskv::cuda {

template <int kWords>
struct TailSpace {
  /** Queries, by pieces of eight channels: two terms of four, then of the other four; behind all
   * heads their third terms, and zeros. Rows apart, so that pieces of all heads meet all banks. */
  alignas(16) uint4 queries[2 * device::kDirectHeads][4 * kWords + 4];
  float2 of_head[device::kDirectHeads];  // the unit of a product, and the shift of a logit
  // What each warp finds of its rows of a step, of head g % 4.
  float tops[device::kDirectWarps][8];
  float2 weights[device::kDirectWarps][8];  // their sum, and the largest with the scale of its row
  uint32_t columns[device::kDirectWarps][32];
};

/** Queries of a pass, of which each warp has a head, less the common part of keys; all threads.
 * Not inlined: its pointers would take registers from the code after it. */
template <int kWords, typename Element>
__device__ __noinline__ void stage_tail_queries(const device::AttendShape& shape, const Element* q,
                                                int64_t stride, int first_head,
                                                const device::CommonRows& common,
                                                TailSpace<kWords>& space) {
  static_assert(device::kDirectHeads == device::kDirectWarps);
  constexpr float kMost = 127 * 256;      // the higher byte has a sign
  constexpr float kRounds = 12582912.0f;  // a sum's lower bits are whole
  const int head = device::warp_id(), lane = device::lane_id();
  const bool there = first_head + head < shape.group;
  float x[kWords], dot = 0, most = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int d = 32 * i + lane;
    x[i] = 0;
    if (!there || d >= shape.key_dim) continue;
    const float own = device::to_float(q[head * stride + d]);
    dot = __fmaf_rn(own, common.key_centre()[d], dot);
    x[i] = common.query(own, d);
    most = fmaxf(most, fabsf(x[i]));
    if (!device::finite(x[i])) most = device::infinity();
  }
  dot = device::warp_sum(dot);
  most = device::warp_max(most);
  // Of a query that is not finite no logit is.
  const float steps = most > 1e-30f && device::finite(most) ? kMost / most : 0.0f;
  auto* const to = reinterpret_cast<uint8_t*>(space.queries[head]);
  auto* const rest_to = reinterpret_cast<uint8_t*>(space.queries[device::kDirectHeads + head]);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int d = 32 * i + lane;
    const int at = d / 8 * 16 + d / 4 % 2 * 8 + d % 4;
    const float rounded = __fmaf_rn(x[i], steps, kRounds);
    const float rest = 256 * __fmaf_rn(x[i], steps, kRounds - rounded);
    const uint32_t bits = device::bits_of(rounded);
    to[at] = uint8_t((bits + 128) >> 8);
    to[at + 4] = uint8_t(bits);
    rest_to[at] = uint8_t(device::bits_of(fminf(rest, 127.0f) + kRounds));
    rest_to[at + 4] = 0;
  }
  const float unit = device::finite(most) ? most / kMost : device::infinity() * 0.0f;
  if (lane == 0) space.of_head[head] = make_float2(unit * shape.scale, dot * shape.scale);
}

/** Words of four rows, turned: one for each of their four channels. */
__device__ __forceinline__ void turn_bytes(const uint32_t (&rows)[4], uint32_t (&channels)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t two = i == 0 ? 0x5140 : 0x7362;
    const uint32_t one = __byte_perm(rows[0], rows[1], two);
    const uint32_t other = __byte_perm(rows[2], rows[3], two);
    channels[2 * i] = __byte_perm(one, other, 0x5410);
    channels[2 * i + 1] = __byte_perm(one, other, 0x7632);
  }
}

/** All warps of a block share a part, and the channels of values. */
template <int kWords, typename Element>
class TailAttention {
 public:
  using Space = TailSpace<kWords>;

  __device__ __forceinline__ TailAttention(const HeadContext& context,
                                           const device::Cluster& blocks, Space& space, int rows)
      : context_(context),
        blocks_(blocks),
        space_(space),
        rows_(rows),
        warp_(device::held_warp()),
        g_(device::held_lane() / 4),
        t_(device::held_lane() % 4),
        term_(g_ < device::kDirectHeads ? 1.0f : 1.0f / 65536) {}

  /**
   * All heads of the group, some at a time.
   * @param q    (group, key_dim), `stride` elements apart
   * @param out  (kParts, group, 2 + value_dim)
   */
  __device__ __forceinline__ void run(const Element* q, int64_t stride, float* out) const {
    const device::AttendShape& shape = context_.shape;
#pragma unroll 1
    for (int first_head = 0; first_head < shape.group; first_head += device::kDirectHeads) {
      if (first_head > 0) __syncthreads();
      stage_tail_queries<kWords>(shape, q + first_head * stride, stride, first_head,
                                 tail_common(context_), space_);
      __syncthreads();
#pragma unroll 1
      for (int part = blocks_.first_part(); part < blocks_.end_part(); ++part) {
        const int64_t at = (int64_t(part) * shape.group + first_head) * (2 + shape.value_dim);
#pragma unroll 1
        for (int first = 0; first < shape.value_dim; first += 32 * kWords) {
          attend(part, first_head, first, out + at);
        }
      }
    }
  }

 private:
  static constexpr int kStepRows = device::kStepRows;
  static constexpr int kHalf = kStepRows / 2;  // rows of a product with values
  static constexpr int kPairRows = 16;         // rows of two runs, which a warp looks at
  static constexpr int kWarps = device::kDirectWarps;
  static_assert(kWarps * kPairRows == kStepRows);
  static constexpr int kOwnWords = kWords < kWarps ? 1 : kWords / kWarps;  // of values

  /** Of a pair's rows 2 t and 2 t + 1 of each run. */
  using PairLogits = float2[2];

  /** Logits of two rows of head g % 4, which do not count where they are not finite. */
  __device__ __forceinline__ float2 logits_of(const uint32_t (&keys)[kWords][2],
                                              float scale) const {
    int32_t dots[4] = {};
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
      const uint4 query = space_.queries[g_][4 * c + t_];
      device::ptx::mma_m16n8k32_s8(dots, {query.x, query.y, query.z, query.w}, keys[c]);
    }
    const float2 of_head = space_.of_head[g_ % device::kDirectHeads];
    float logits[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Lane 4 g + t has two terms, lane 4 (g + 4) + t the third.
      const float own = float(dots[i] * 256 + dots[2 + i]) * term_;
      const float dot = (own + __shfl_xor_sync(~0u, own, 16)) * of_head.x;
      logits[i] = __fmaf_rn(dot, __shfl_sync(~0u, scale, 8 * t_ + 4 * i), of_head.y);
    }
    const float softcap = context_.shape.softcap;
    if (softcap > 0) {
#pragma unroll
      for (float& logit : logits) logit = device::cap_softly(logit, softcap);
    }
#pragma unroll
    for (float& logit : logits) logit = device::finite(logit) ? logit : -device::infinity();
    return make_float2(logits[0], logits[1]);
  }

  /**
   * Logits of a pair from row `first` on, of which `left` are there, one at least; they are noted.
   * @param scales  of values, likewise
   */
  __device__ __forceinline__ void look(int first, int left, int first_head, PairLogits& logits,
                                       float2 (&scales)[2]) const {
    const int key_dim = context_.shape.key_dim, group = context_.shape.group;
    // Lane 4 g has that of row g's key, lane 4 g + 1 that of its value.
    const int at_scale =
        t_ == 0 ? key_dim : key_dim + int(sizeof(float)) + context_.shape.value_dim;
    uint32_t keys[2][kWords][2];
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* key = tail_copy(context_, first + min(8 * i + g_, left - 1));
#pragma unroll
      for (int c = 0; c < kWords; ++c) {
        const int d = 32 * c + 8 * t_;
        const auto* words = reinterpret_cast<const uint32_t*>(key + d);
        // Where dimensions end within a piece, queries have zeros.
        keys[i][c][0] = d < key_dim ? words[0] : 0;
        keys[i][c][1] = d < key_dim ? words[1] : 0;
      }
      scale[i] = *reinterpret_cast<const float*>(key + at_scale);
    }
    const int head = first_head + g_;
    const bool stores = g_ < device::kDirectHeads && head < group;
    float* const noted = context_.scratch.tail_logits + (first + 2 * t_) * group + head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      logits[i] = logits_of(keys[i], scale[i]);
      scales[i] = make_float2(__shfl_sync(~0u, scale[i], 8 * t_ + 1),
                              __shfl_sync(~0u, scale[i], 8 * t_ + 5));
      const int row = 8 * i + 2 * t_;
      if (stores && row < left) noted[8 * i * group] = logits[i].x;
      if (stores && row + 1 < left) noted[(8 * i + 1) * group] = logits[i].y;
      if (row >= left) logits[i].x = -device::infinity();
      if (row + 1 >= left) logits[i].y = -device::infinity();
    }
  }

  /** The largest one, over all lanes of a head. */
  __device__ __forceinline__ static float most_of_head(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  /** Of four runs rows 2 t and 2 t + 1: words of four neighbouring channels. */
  using Words = uint32_t[kOwnWords][8];

  /** The first channel of a lane's word, beyond the first one of a pass; and whether it is there.
   */
  __device__ __forceinline__ int channel(int w) const { return 32 * (warp_ + w * kWarps) + 4 * g_; }
  __device__ __forceinline__ bool is_there(int w, int first_value) const {
    return channel(w) < 32 * kWords && first_value + channel(w) < context_.shape.value_dim;
  }

  /** Words of values of half a step from row `first` on, up to `last`. */
  __device__ __forceinline__ void load(int first, int last, int first_value, Words& words) const {
    const int at = context_.shape.key_dim + int(sizeof(float)) + first_value;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const char* row = tail_copy(context_, min(first + i / 2 * 8 + 2 * t_ + i % 2, last)) + at;
#pragma unroll
      for (int w = 0; w < kOwnWords; ++w) {
        words[w][i] =
            is_there(w, first_value) ? *reinterpret_cast<const uint32_t*>(row + channel(w)) : 0;
      }
    }
  }

  /** Weights of a step's rows, as products take them, and their unit. */
  struct Weights {
    uint32_t columns[2][2];  // of a half
    float unit;
  };

  /**
   * Of a step, of which this warp has the logits of a pair. All threads; three barriers.
   * @param rescale  what sums so far are to be multiplied with
   */
  __device__ __forceinline__ Weights weigh(PairLogits& logits, const float2 (&scales)[2],
                                           device::DirectSums& sums, float& rescale) const {
    constexpr float kMost = 65535;
    constexpr float kRounds = 8388608.0f;  // the lower two bytes of a sum are the number
    float top = fmaxf(fmaxf(logits[0].x, logits[0].y), fmaxf(logits[1].x, logits[1].y));
    top = most_of_head(top);
    if (t_ == 0) space_.tops[warp_][g_] = top;
    __syncthreads();
    top = sums.maximum;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) top = fmaxf(top, space_.tops[i][g_]);
    float shift;
    rescale = device::raise_to(top, sums, shift);
    float sum = 0;
    uint32_t most = 0;  // by their bits, so that one which is no number is the largest
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2& two = logits[r];
      two = make_float2(device::exp_of(two.x - shift), device::exp_of(two.y - shift));
      sum = __fadd_rn(sum, __fadd_rn(two.x, two.y));
      // Of a row that does not count the scale may be no number.
      two.x = two.x == 0 ? 0.0f : two.x * scales[r].x;
      two.y = two.y == 0 ? 0.0f : two.y * scales[r].y;
      most = max(most, max(device::bits_of(two.x), device::bits_of(two.y)));
    }
    sum = device::sum_of_head(sum);
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    if (t_ == 0) space_.weights[warp_][g_] = make_float2(sum, device::float_of(most));
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float2 other = space_.weights[i][g_];
      sums.sum = __fadd_rn(sums.sum, other.x);
      most = max(most, device::bits_of(other.y));
    }
    const float largest = device::float_of(most);
    const float steps = largest > 1e-30f ? kMost * __frcp_rn(largest) : 0.0f;
    const auto both = [&](const float2& two) {
      return __byte_perm(device::bits_of(__fmaf_rn(two.x, steps, kRounds)),
                         device::bits_of(__fmaf_rn(two.y, steps, kRounds)), 0x5410);
    };
    space_.columns[warp_][device::lane_id()] =
        __byte_perm(both(logits[0]), both(logits[1]), g_ < device::kDirectHeads ? 0x7531 : 0x6420);
    __syncthreads();
    Weights out{{}, largest * (1 / kMost)};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      out.columns[i / 2][i % 2] = space_.columns[i][device::lane_id()];
    }
    return out;
  }

  /** A part, for 32 kWords channels of values from `first_value` on. */
  __device__ __forceinline__ void attend(int part, int first_head, int first_value,
                                         float* out) const {
    const int begin = device::part_begin(rows_, part), end = device::part_begin(rows_, part + 1);
    device::DirectSums sums{-device::infinity(), 0};
    float weighted[kOwnWords][2][4] = {};
#pragma unroll 1
    for (int first = begin; first < end; first += kStepRows) {
      PairLogits logits = {{-device::infinity(), -device::infinity()},
                           {-device::infinity(), -device::infinity()}};
      float2 scales[2] = {};
      const int row = first + kPairRows * warp_;
      if (row < end) look(row, min(end - row, kPairRows), first_head, logits, scales);
      Words words;
      load(first, end - 1, first_value, words);
      float rescale;
      const Weights weights = weigh(logits, scales, sums, rescale);
      const device::ColumnScales before(rescale);
#pragma unroll
      for (int w = 0; w < kOwnWords; ++w) {
#pragma unroll
        for (int p = 0; p < 2; ++p) before.apply(weighted[w][p]);
      }
      device::ColumnScales units(weights.unit);
      if (!device::joins_second()) units.even *= 256, units.odd *= 256;  // of the higher byte
      add(words, weights.columns[0], units, weighted);
      if (end - first <= kHalf) continue;
      load(first + kHalf, end - 1, first_value, words);
      add(words, weights.columns[1], units, weighted);
    }
    leave(weighted, sums, first_head, first_value, out);
  }

  /** Adds weighted values of half a step. */
  __device__ __forceinline__ static void add(const Words& words, const uint32_t (&weights)[2],
                                             const device::ColumnScales& units,
                                             float (&weighted)[kOwnWords][2][4]) {
#pragma unroll
    for (int w = 0; w < kOwnWords; ++w) {
      uint32_t lower[4], upper[4];
      turn_bytes({words[w][0], words[w][1], words[w][2], words[w][3]}, lower);
      turn_bytes({words[w][4], words[w][5], words[w][6], words[w][7]}, upper);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        int32_t dots[4] = {};
        device::ptx::mma_m16n8k32_s8_u8(
            dots, {lower[2 * p], lower[2 * p + 1], upper[2 * p], upper[2 * p + 1]}, weights);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weighted[w][p][i] =
              __fmaf_rn(float(dots[i]), i % 2 == 0 ? units.even : units.odd, weighted[w][p][i]);
        }
      }
    }
  }

  /** What a part leaves. */
  __device__ __forceinline__ void leave(const float (&weighted)[kOwnWords][2][4],
                                        device::DirectSums sums, int first_head, int first_value,
                                        float* out) const {
    const int heads = min(context_.shape.group - first_head, device::kDirectHeads);
    const int step = 2 + context_.shape.value_dim;
    if (first_value == 0 && warp_ == 0 && t_ == 0 && g_ < heads) {
      *reinterpret_cast<float2*>(out + g_ * step) = make_float2(sums.maximum, sums.sum);
    }
    const bool second = device::joins_second();
    const int head = 2 * (t_ % 2) + second;
#pragma unroll
    for (int w = 0; w < kOwnWords; ++w) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const float2 pair = device::join_columns(weighted[w][p], second);
        if (head >= heads || !is_there(w, first_value)) continue;
        *reinterpret_cast<float2*>(out + head * step + 2 + first_value + channel(w) + 2 * p) = pair;
      }
    }
  }

  const HeadContext& context_;
  const device::Cluster& blocks_;
  Space& space_;
  int rows_;
  int warp_, g_, t_;
  float term_;  // the unit of this lane's terms of queries
};

}  // namespace pariskv::cuda
