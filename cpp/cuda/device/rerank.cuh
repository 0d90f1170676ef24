/**
 * Candidates to what they are worth: estimated logits from the 4-bit codes, the log-sum-exp of each
 * head over resident rows and candidates, the attention that a row would get.
 */
#pragma once

#include "device/cluster.cuh"
#include "device/numbers.cuh"
#include "device/score.cuh"

namespace pariskv::cuda::device {

/** The candidates of one block. Pointers lead to shared memory, or to scratch when they are many.
 */
struct Slice {
  int first, count;  // among the candidates of the head
  bool kept;         // in shared memory
  int32_t* offsets;  // (count) from the zone's begin
  float* estimates;  // (searchers, ...) `stride` apart
  int64_t stride;
  float* worth;  // (count)
};

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

/** Where the summary of a candidate is; what a lane looks up for its warp. */
struct CandidateBase {
  const uint8_t* block;
  int slot;
};

/**
 * Estimates of the slice for searchers [first, first + 4) of the head. 2 * kWords lanes share a
 * key, 16 dimensions each.
 * @param candidates  (slice.count) offsets from the zone's begin, in scratch
 * @param rotated     (4, 32 kWords) of these searchers, as rotated
 * @param factor      what turns weights and centres into logits
 * @param centres     (16) level + 8 * sign bit
 * @param searchers   of these four that are there
 * @param out         (4, ...) in scratch, `out_stride` apart
 */
template <int kWords>
__device__ __forceinline__ void estimate(const Zone& zone, const Slice& slice,
                                         const int32_t* candidates, const float* rotated,
                                         float factor, const float* centres, float softcap,
                                         int searchers, int first, float* out, int64_t out_stride) {
  constexpr int kLanes = 2 * kWords;  // of a key
  constexpr int kKeys = 32 / kLanes;  // at a time
  const int part = lane_id() % kLanes;
  float query[4][16];
#pragma unroll
  for (int h = 0; h < 4; ++h) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      query[h][i] =
          h < searchers ? __fmul_rn(rotated[h * 32 * kWords + 16 * part + i], factor) : 0.0f;
    }
  }
  // Evenly over the warps, at most a candidate per lane at a time.
  const int share = min((slice.count + kWarps - 1) / kWarps, 32);
#pragma unroll 1
  for (int base = warp_id() * share; base < slice.count; base += kWarps * share) {
    const int count = min(share, slice.count - base);
    CandidateBase mine{nullptr, 0};
    if (lane_id() < count) {
      const int offset = candidates[base + lane_id()];
      if (slice.kept) slice.offsets[base + lane_id()] = offset;
      const Slot at = slot_of(zone, zone.begin + offset);
      mine = {at.block, at.slot};
    }
    const auto load = [&](int key) {
      const int from = min(key + lane_id() / kLanes, count - 1);
      const uint64_t block = __shfl_sync(~0u, reinterpret_cast<uint64_t>(mine.block), from);
      const int slot = __shfl_sync(~0u, mine.slot, from);
      const auto* bytes = reinterpret_cast<const uint8_t*>(block);
      const auto* record = bytes + zone.layout.records(zone.head, slot);
      const auto pair = [](const uint8_t* at) {
        return uint32_t(*reinterpret_cast<const uint16_t*>(at));
      };
      Code code;
#pragma unroll
      for (int plane = 0; plane < 3; ++plane) {
        code.plane[plane] = pair(record + plane * 4 * kWords + 2 * part);
      }
      code.weights = pair(record + 12 * kWords + 2 * part);
      code.signs = pair(bytes + zone.layout.signs(zone.head, slot) + 2 * part);
      code.scale = pair(bytes + zone.layout.scales(zone.head, slot));
      return code;
    };
    const auto compute = [&](const Code& code, int key) {
      const uint32_t planes01 = __byte_perm(code.plane[0], code.plane[1], 0x5140);
      const uint32_t planes23 = __byte_perm(code.plane[2], code.signs, 0x5140);
      float sums[4] = {};
      // A byte in the mantissa of 2^23 is that number more.
      add_subspace(__byte_perm(planes01, planes23, 0x5410),
                   __byte_perm(code.weights, 0x4b000000, 0x7440), centres, query, 0, sums);
      add_subspace(__byte_perm(planes01, planes23, 0x7632),
                   __byte_perm(code.weights, 0x4b000000, 0x7441), centres, query, 8, sums);
      // Four sums over the lanes of a key: two exchanges leave a lane with one of them.
      const bool upper = part & kWords, odd = part & (kWords / 2);
      float two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float give = upper ? sums[i] : sums[2 + i], keep = upper ? sums[2 + i] : sums[i];
        two[i] = keep + __shfl_xor_sync(~0u, give, kWords);
      }
      const float give = odd ? two[0] : two[1], keep = odd ? two[1] : two[0];
      float sum = keep + __shfl_xor_sync(~0u, give, kWords / 2);
#pragma unroll
      for (int step = kWords / 4; step >= 1; step /= 2) {
        sum = sum + __shfl_xor_sync(~0u, sum, step);
      }
      const int h = (upper ? 2 : 0) + (odd ? 1 : 0);
      const int index = key + lane_id() / kLanes;
      if (part % (kWords / 2) != 0 || h >= searchers || index >= count) return;
      const float logit = soft_capped(__fmul_rn(sum, scale_of(code.scale)), softcap);
      if (slice.kept) slice.estimates[(first + h) * slice.stride + base + index] = logit;
      out[h * out_stride + base + index] = logit;
    };
    // A key per group of lanes is worked on while two are on their way.
    Code now = load(0), next = load(kKeys);
#pragma unroll 1
    for (int key = 0; key < count; key += kKeys) {
      const Code after = load(key + 2 * kKeys);
      compute(now, key);
      now = next;
      next = after;
    }
  }
}

/** What is known of a part of one head's candidates. */
struct Mass {
  float maximum, sum;
};

/** A part of the candidates is summed up by this many warps. */
constexpr int kMassStrands = 4;

/**
 * Maximum and sum of exponentials of the block's estimates, for `heads` searchers from `first` on:
 * one entry per part, head and strand. The order of additions is fixed by these alone.
 * @param total  candidates of the head, in all blocks
 * @param out    (parts of the block, heads, kMassStrands) in shared memory
 */
__device__ __forceinline__ void sum_masses(const Cluster& cluster, const Slice& slice, int total,
                                           int first, int heads, Mass* out) {
  const int parts = cluster.end_part() - cluster.first_part();
#pragma unroll 1
  for (int task = warp_id(); task < parts * heads * kMassStrands; task += kWarps) {
    const int strand = task % kMassStrands, head = task / kMassStrands % heads;
    const int part = cluster.first_part() + task / kMassStrands / heads;
    const float* estimates = slice.estimates + (first + head) * slice.stride;
    const int begin = part_begin(total, part) - slice.first + 32 * strand + lane_id();
    const int end = part_begin(total, part + 1) - slice.first;
    float maximum = -infinity(), sum = 0;
    for (int i = begin; i < end; i += 32 * kMassStrands) maximum = fmaxf(maximum, estimates[i]);
    maximum = warp_max(maximum);
    const float shift = maximum == -infinity() ? 0.0f : maximum;
    for (int i = begin; i < end; i += 32 * kMassStrands) sum = sum + exp_of(estimates[i] - shift);
    sum = warp_sum(sum);
    if (lane_id() == 0) out[task] = {maximum, sum};
  }
}

/** Maximum and sum of two entries per lane together, the same in every lane. */
__device__ __forceinline__ Mass combine(const Mass& a, const Mass& b) {
  const float top = warp_max(fmaxf(a.maximum, b.maximum));
  const float of_a = a.maximum == -infinity() ? 0.0f : exp_of(a.maximum - top);
  const float of_b = b.maximum == -infinity() ? 0.0f : exp_of(b.maximum - top);
  return {top, warp_sum(__fmaf_rn(a.sum, of_a, b.sum * of_b))};
}

/**
 * The log-sum-exp of every head over its resident rows and all candidates, a warp per head.
 * @param masses    of this block; the others' are read too. After a barrier of the cluster
 * @param resident  (kParts, group, 2 + head_dim) of the head's first query head in scratch
 * @param step      floats from part to part, `head_step` from head to head
 * @param bias      (heads) or null
 * @param out       (heads) in shared memory; NaN or infinite where a head has no say
 */
__device__ __forceinline__ void sum_up(const Cluster& cluster, const Mass* masses, int heads,
                                       const float* resident, int64_t step, int64_t head_step,
                                       const float* bias, float* out) {
  const int head = warp_id();
  if (head >= heads) return;
  const auto mass_of = [&](int entry) {
    const int part = entry / kMassStrands, parts = kParts / cluster.size;
    const int local = (part % parts * heads + head) * kMassStrands + entry % kMassStrands;
    return *cluster.of(&masses[local], part / parts);
  };
  const float* mine = resident + head * head_step + lane_id() * step;
  const Mass none{-infinity(), 0};
  const Mass seen = lane_id() < kParts ? Mass{__ldcg(mine), __ldcg(mine + 1)} : none;
  const Mass rows = combine(seen, none);
  const Mass found = combine(mass_of(lane_id()), mass_of(lane_id() + 32));
  float all = log_of_sum(rows.maximum, rows.sum);
  if (bias != nullptr) all = log_add(all, bias[head]);
  all = log_add(log_of_sum(found.maximum, found.sum), all);
  if (lane_id() == 0) out[head] = all;
}
static_assert(kParts * kMassStrands == 64, "two entries per lane");

/** Adds what `heads` searchers from `first` on would give to each candidate of the block. */
__device__ __forceinline__ void add_worth(const Slice& slice, const float* all, int first,
                                          int heads) {
  for (int i = threadIdx.x; i < slice.count; i += kThreads) {
    float worth = first == 0 ? 0.0f : slice.worth[i];
    for (int head = 0; head < heads; ++head) {
      // A broken query has no say in what the others get.
      if (!finite(all[head])) continue;
      const float logit = slice.estimates[(first + head) * slice.stride + i];
      worth = worth + exp_of(fmaxf(logit - all[head], -87.0f));
    }
    slice.worth[i] = worth;
  }
}

}  // namespace pariskv::cuda::device
