/** split_budget: how the budget is split by how far queries agree. A block for each job. */
#pragma once

#include "device/signal.cuh"
#include "prkv/keep/item.cuh"

namespace pariskv::cuda {

constexpr int kSplitThreads = 32;

inline __global__ void __launch_bounds__(kSplitThreads)
    split_budget(const __grid_constant__ PRKVChoiceParams params) {
  device::let_successor_start();
  device::wait_for_predecessor();
  const int job = int(blockIdx.x), heads = int(params.choice.call.heads);
  const PRKVRules& rules = params.rules;
  const int group = int(params.choice.call.shape.group);
  int64_t agreed = 0, compared = 0;
  for (int i = int(threadIdx.x); i < heads * group; i += kSplitThreads) {
    const int own = PRKVItem(params, job * heads + i / group).agreed()[i % group];
    agreed += max(own, 0), compared += own >= 0;
  }
  agreed = device::warp_sum(agreed), compared = device::warp_sum(compared);
  if (threadIdx.x != 0) return;
  *PRKVItem(params, job * heads).amended().split() =
      rules.split(compared == 0 ? 0 : agreed / (compared * rules.page));
}

}  // namespace pariskv::cuda
