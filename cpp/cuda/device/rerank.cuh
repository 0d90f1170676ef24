/**
 * Candidates to what they are worth: estimated logits from the 4-bit codes, the log-sum-exp of each
 * head over resident rows and candidates, the attention that a row would get.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/gather.cuh"
#include "device/numbers.cuh"

namespace pariskv::cuda::device {

/** Signs, magnitude planes and weights of 16 dimensions, and the scale of the key. */
struct Code {
  uint32_t plane[3], signs, weights, scale;
};

/** Bit d of four planes to nibble d, in the order 0 4 1 5 2 6 3 7: two exchanges of index bits. */
__device__ __forceinline__ uint32_t transposed(uint32_t planes) {
  uint32_t swap = (planes ^ planes >> 14) & 0x0000cccc;
  planes ^= swap ^ swap << 14;
  swap = (planes ^ planes >> 7) & 0x00aa00aa;
  return planes ^ swap ^ swap << 7;
}

/** Adds 8 dimensions: weight * sum of centre * query, for four queries. */
__device__ __forceinline__ void add_subspace(uint32_t planes, uint32_t weight_bits,
                                             const float* centres, const float (&query)[4][16],
                                             int first, float (&sums)[4]) {
  const uint32_t nibbles = transposed(planes);
  // Byte offsets into the 16 centres: dimensions 0 to 3, and 4 to 7.
  const uint32_t low = (nibbles & 0x0f0f0f0fu) << 2, high = nibbles >> 2 & 0x3c3c3c3cu;
  float part[4];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t offset = __byte_perm(j < 4 ? low : high, 0, 0x4440 + j % 4);
    const float centre =
        *reinterpret_cast<const float*>(reinterpret_cast<const char*>(centres) + offset);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      part[h] = j == 0 ? __fmul_rn(centre, query[h][first])
                       : __fmaf_rn(centre, query[h][first + j], part[h]);
    }
  }
  const float weight = float_of(weight_bits) - 8388608.0f;
#pragma unroll
  for (int h = 0; h < 4; ++h) sums[h] = __fmaf_rn(part[h], weight, sums[h]);
}

/** A running sum of exponentials: of sum * e^maximum. */
struct Mass {
  float maximum, sum;

  /** NaN is left out of the maximum and stays in the sum. */
  __device__ __forceinline__ void add(float x) {
    const float top = fmaxf(maximum, x);
    const float shift = top == -infinity() ? 0.0f : top;
    sum = __fmaf_rn(sum, exp_of(maximum - shift), exp_of(x - shift));
    maximum = top;
  }
  __device__ __forceinline__ void add(const Mass& other) {
    const float top = fmaxf(maximum, other.maximum);
    const float shift = top == -infinity() ? 0.0f : top;
    sum = __fmaf_rn(sum, exp_of(maximum - shift), other.sum * exp_of(other.maximum - shift));
    maximum = top;
  }
};

/** Four queries of a head, as a lane needs them that has 16 dimensions of a key. */
template <int kWords>
struct EstimateQueries {
  static constexpr int kLanes = 2 * kWords;  // of a key
  float query[4][16];

  /** @param rotated  (count, 32 * kWords), times what turns weights and centres into logits */
  __device__ __forceinline__ void load(const float* rotated, int count) {
    const float* mine = rotated + 16 * (lane_id() % kLanes);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        float4 four = make_float4(0, 0, 0, 0);
        if (h < count) four = __ldcg(reinterpret_cast<const float4*>(mine + h * 32 * kWords + i));
        query[h][i] = four.x, query[h][i + 1] = four.y;
        query[h][i + 2] = four.z, query[h][i + 3] = four.w;
      }
    }
  }
};

/**
 * Estimated logits of gathered codes for four queries, and this lane's sums of their exponentials.
 * 2 * kWords lanes share a key. A lane's sums are of query `estimate_head()`.
 * @param codes    (count) of CodeLayout
 * @param places   (count)
 * @param centres  (16) level + 8 * sign bit
 * @param out      (4, ...) `stride` apart
 */
template <int kWords>
__device__ __forceinline__ void estimate(const EstimateQueries<kWords>& queries, const char* codes,
                                         const KeyPlace* places, int count, const float* centres,
                                         float softcap, int heads, float* out, int64_t stride,
                                         Mass& mass) {
  using Layout = CodeLayout<kWords>;
  constexpr int kLanes = 2 * kWords, kKeys = 32 / kLanes;
  const int part = lane_id() % kLanes;
  const bool upper = part & kWords, odd = part & (kWords / 2);
  const int h = (upper ? 2 : 0) + (odd ? 1 : 0);
#pragma unroll 1
  for (int base = warp_id() * kKeys; base < count; base += kWarps * kKeys) {
    const int key = base + lane_id() / kLanes;
    const bool there = key < count;
    const int known = there ? key : base;
    const int slot = places[known].slot;
    const char* code = codes + known * Layout::kPitch;
    const auto pair = [&](int at) {
      return uint32_t(*reinterpret_cast<const uint16_t*>(code + at + 2 * part));
    };
    const uint32_t planes01 = __byte_perm(pair(0), pair(4 * kWords), 0x5140);
    const uint32_t planes23 = __byte_perm(pair(8 * kWords), pair(Layout::signs(slot)), 0x5140);
    const uint32_t weights = pair(12 * kWords);
    float sums[4] = {};
    // A byte in the mantissa of 2^23 is that number more.
    add_subspace(__byte_perm(planes01, planes23, 0x5410), __byte_perm(weights, 0x4b000000, 0x7440),
                 centres, queries.query, 0, sums);
    add_subspace(__byte_perm(planes01, planes23, 0x7632), __byte_perm(weights, 0x4b000000, 0x7441),
                 centres, queries.query, 8, sums);
    // Four sums over the lanes of a key: two exchanges leave a lane with one of them.
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float give = upper ? sums[i] : sums[2 + i], keep = upper ? sums[2 + i] : sums[i];
      two[i] = keep + __shfl_xor_sync(~0u, give, kWords);
    }
    const float give = odd ? two[0] : two[1], keep = odd ? two[1] : two[0];
    float sum = keep + __shfl_xor_sync(~0u, give, kWords / 2);
#pragma unroll
    for (int step = kWords / 4; step >= 1; step /= 2) sum = sum + __shfl_xor_sync(~0u, sum, step);
    if (part % (kWords / 2) != 0 || h >= heads || !there) continue;
    const uint32_t scale = *reinterpret_cast<const uint16_t*>(code + Layout::scale(slot));
    const float logit = soft_capped(__fmul_rn(sum, scale_of(scale)), softcap);
    out[h * stride + key] = logit;
    mass.add(logit);
  }
}

/** Which of four queries this lane's sums are of; -1: it has none. */
template <int kWords>
__device__ __forceinline__ int estimate_head() {
  const int part = lane_id() % (2 * kWords);
  if (part % (kWords / 2) != 0) return -1;
  return (part & kWords ? 2 : 0) + (part & (kWords / 2) ? 1 : 0);
}

/** The sums of all keys of a warp, in the order of exchanges: for each lane's own query. */
template <int kWords>
__device__ __forceinline__ Mass mass_of_warp(Mass mass) {
#pragma unroll
  for (int step = 2 * kWords; step < 32; step *= 2) {
    const Mass other{__shfl_xor_sync(~0u, mass.maximum, step),
                     __shfl_xor_sync(~0u, mass.sum, step)};
    // The lower lane's first, so that both lanes of a pair get the same.
    Mass first = lane_id() & step ? other : mass;
    first.add(lane_id() & step ? mass : other);
    mass = first;
  }
  return mass;
}

/** Several masses, added in order. */
template <int kCount>
__device__ __forceinline__ Mass sum_of(const Mass (&masses)[kCount]) {
  float top = -infinity();
#pragma unroll
  for (int i = 0; i < kCount; ++i) top = fmaxf(top, masses[i].maximum);
  const float shift = top == -infinity() ? 0.0f : top;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum = __fmaf_rn(masses[i].sum, exp_of(masses[i].maximum - shift), sum);
  }
  return {top, sum};
}

/** Masses of all lanes together, the same in every lane. */
__device__ __forceinline__ Mass combine(const Mass& mine) {
  const float top = warp_max(mine.maximum);
  const float of = mine.maximum == -infinity() ? 0.0f : exp_of(mine.maximum - top);
  return {top, warp_sum(mine.sum * of)};
}

/**
 * The log-sum-exp of every head over its resident rows and all candidates, a warp per head.
 * @param masses    (kSlices, ...) of the candidates, `group` apart, at the first head
 * @param resident  (kParts, group, 2 + head_dim) at the first head
 * @param step      floats from part to part, `head_step` from head to head
 * @param bias      (heads) or null
 * @param out       (heads) in shared memory; NaN or infinite where a head has no say
 */
__device__ __forceinline__ void sum_up(const Mass* masses, int group, int heads,
                                       const float* resident, int64_t step, int64_t head_step,
                                       const float* bias, float* out) {
  for (int head = warp_id(); head < heads; head += kWarps) {
    Mass seen{-infinity(), 0};
    const float2 mass = __ldcg(reinterpret_cast<const float2*>(masses + lane_id() * group + head));
    if (lane_id() < kParts) {
      const float* rows = resident + head * head_step + lane_id() * step;
      seen = {__ldcg(rows), __ldcg(rows + 1)};
    }
    Mass found{mass.x, mass.y};
    seen = combine(seen);
    found = combine(found);
    float all = log_of_sum(seen.maximum, seen.sum);
    if (bias != nullptr) all = log_add(all, bias[head]);
    all = log_add(log_of_sum(found.maximum, found.sum), all);
    if (lane_id() == 0) out[head] = all;
  }
}

static_assert(kSlices == 32, "a lane for each slice");

/** What a row would get of the attention of a head. */
__device__ __forceinline__ float share_of(float logit, float all) {
  return exp_of(fmaxf(logit - all, -87.0f));
}

}  // namespace pariskv::cuda::device
