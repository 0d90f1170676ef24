/** The parts that attention to rows has left, put together: what a query head is given. */
#pragma once

#include "device/attend.cuh"

namespace pariskv::cuda::device {

/** How the parts of one query head combine. */
struct PartFactors {
  float maximum, sum;
  float factor;  // of this lane's part
};

/** Lane p brings part p: resident parts first, then fetched ones. */
__device__ __forceinline__ PartFactors combine_parts(float maximum, float sum) {
  const float top = warp_max(maximum);
  const float factor = maximum == -infinity() ? 0.0f : exp_of(maximum - top);
  return {top, warp_sum(sum * factor), factor};
}

/**
 * Adds the parts of one query head up, for 32 dimensions from `begin` on, a warp. Both are
 * (kParts, group, 2 + head_dim), at this head; `fetched` null: nothing was.
 */
struct Merged {
  float maximum, sum, weighted;
};
__device__ __forceinline__ Merged merge_parts(const float* resident, const float* fetched,
                                              const AttendShape& shape, int begin) {
  const int64_t step = int64_t(shape.group) * (2 + shape.head_dim);
  const int lane = lane_id();
  const float* mine = lane < kParts        ? resident + lane * step
                      : fetched == nullptr ? nullptr
                                           : fetched + (lane - kParts) * step;
  const float maximum = mine == nullptr ? -infinity() : __ldcg(mine);
  const float sum = mine == nullptr ? 0.0f : __ldcg(mine + 1);
  const int d = begin + lane;
  float values[2 * kParts];
#pragma unroll
  for (int part = 0; part < 2 * kParts; ++part) {
    const float* from = part < kParts ? resident + part * step : fetched + (part - kParts) * step;
    values[part] =
        (part < kParts || fetched != nullptr) && d < shape.head_dim ? __ldcg(from + 2 + d) : 0.0f;
  }
  const PartFactors parts = combine_parts(maximum, sum);
  float weighted = 0;
#pragma unroll
  for (int part = 0; part < 2 * kParts; ++part) {
    weighted = __fmaf_rn(__shfl_sync(~0u, parts.factor, part), values[part], weighted);
  }
  return {parts.maximum, parts.sum, weighted};
}

}  // namespace pariskv::cuda::device
