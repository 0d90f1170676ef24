/** What a head sees in all: its resident rows, the candidates, keys that stand for all others. */
#pragma once

#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/mass.cuh"

namespace pariskv::cuda::device {

/** The largest over a warp; a NaN that has no sign is larger than everything. */
__device__ __forceinline__ float largest_of_warp(float x) {
  const uint32_t key = __reduce_max_sync(~0u, sortable(x));
  return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/** To about 2^-22; minus infinity for 0. */
__device__ __forceinline__ float log2_of(float x) { return ptx::lg2_approx_ftz(x); }

/** What a lane adds to the log-sum-exp of a head. */
struct LaneMasses {
  Mass estimated, resident;
};

/** Where the sums of all heads are from which their log-sum-exps are made. */
struct HeadMasses {
  const Mass* estimated;  // (kSlices, ...) of the candidates, `group` apart, at the first head
  const float* resident;  // (kParts, group, 2 + value_dim) at the first head
  const float* bias;      // (heads) or null
  int group;
  int64_t row;  // 2 + value_dim

  __device__ __forceinline__ LaneMasses load(int head) const {
    const float2 found =
        __ldcg(reinterpret_cast<const float2*>(estimated + lane_id() * group + head));
    LaneMasses of{{found.x, found.y}, {-infinity(), 0}};
    if (lane_id() < kParts) {
      const float* rows = resident + (lane_id() * group + head) * row;
      of.resident = {__ldcg(rows), __ldcg(rows + 1)};
    } else if (lane_id() == kParts && bias != nullptr) {
      of.resident = {bias[head], 1};
    }
    return of;
  }
};

/**
 * The log-sum-exp of every head over its resident rows and all candidates, a warp per head: of what
 * its lanes have, two each, as one sum, so that there is one chain of exchanges.
 * @param first  of the head whose number is the warp's, or of any where there is none
 * @param out    (heads) in shared memory; NaN or infinite where a head has no say
 */
__device__ __forceinline__ void sum_up(const HeadMasses& masses, int heads, LaneMasses first,
                                       float* out) {
#pragma unroll 1
  for (int head = warp_id(); head < heads; head += kWarps) {
    const LaneMasses of = head == warp_id() ? first : masses.load(head);
    const float top = largest_of_warp(fmaxf(of.estimated.maximum, of.resident.maximum));
    const float shift = top == -infinity() ? 0.0f : top;
    const float sum = warp_sum(of.estimated.sum * exp_of(of.estimated.maximum - shift) +
                               of.resident.sum * exp_of(of.resident.maximum - shift));
    if (lane_id() == 0) out[head] = top + log2_of(sum) * 0.693147180559945309f;
  }
}

static_assert(kSlices == 32, "a lane for each slice");
static_assert(kParts < 32, "and one for the bias");

/** What a row would get of the attention of a head. */
__device__ __forceinline__ float share_of(float logit, float all) {
  return exp_of(fmaxf(logit - all, -87.0f));
}

}  // namespace pariskv::cuda::device
