/** How much a head finds in its window, from the logits that the kernel before leaves. */
#pragma once

#include "device/signal.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/steps.cuh"

namespace pariskv::cuda::device {

/**
 * The log-sum-exp of the window for one head, in octaves; a warp. Waits for its rows.
 * @param rows   (kWindowRows) window words: see signal.cuh
 * @param token  of the step
 * @param bias  of the sink; null: none
 */
__device__ __forceinline__ float sum_window(const uint64_t* rows, uint32_t token,
                                            const float* bias) {
  constexpr int kOfLane = int(kWindowRows) / 32;
  uint64_t found[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) found[i] = load_relaxed(rows + lane_id() + 32 * i);
  int steps[kOfLane + 1];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    while (uint32_t(found[i] >> 32) != token) found[i] = load_relaxed(rows + lane_id() + 32 * i);
    steps[i] = int(uint32_t(found[i]));
  }
  steps[kOfLane] = lane_id() == 0 && bias != nullptr && finite(*bias)
                       ? steps_of(__fmul_rn(*bias, kOctaveSteps))
                       : kNoSteps;
  int most = kNoSteps;
#pragma unroll
  for (int i = 0; i <= kOfLane; ++i) most = max(most, steps[i]);
  most = __reduce_max_sync(~0u, most);
  if (most == kNoSteps) return -infinity();
  int sum = 0;
#pragma unroll
  for (int i = 0; i <= kOfLane; ++i) {
    const int less = most - steps[i];
    if (less < 1024) sum += ((64 + (-less & 63)) << 10) >> ((less + 63) >> 6);
  }
  sum = __reduce_add_sync(~0u, sum);
  return __fadd_rn(__fmul_rn(float(most), 0x1p-6f), __fsub_rn(rough_log2(float(sum)), 16.0f));
}

}  // namespace pariskv::cuda::device
