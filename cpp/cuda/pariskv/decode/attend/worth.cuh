/** What each candidate is worth: the share of its query heads' attention that it would get. */
#pragma once

#include "pariskv/decode/attend/head_masses.cuh"
#include "pariskv/decode/context.cuh"

namespace pariskv::cuda {

/** Logits of a few heads that come while there is other work: at first the sums of all heads. */
struct LogitsAhead {
  static constexpr int kTurns = 2, kFew = 4;
  float logits[kTurns][kFew];

  /** Of a thread's next candidates, from `begin` on. */
  __device__ __forceinline__ void load(const float* estimates, int64_t stride, int heads, int count,
                                       int begin) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int head = 0; head < kFew; ++head) {
        const int i = begin + turn * device::kThreads;
        const bool exists = i < count && head < heads;
        logits[turn][head] = exists ? __ldcg(estimates + head * stride + i) : 0.0f;
      }
    }
  }
};

/** Of one block's candidates. */
template <typename Element, int kWords>
struct Weighing {
  const HeadBlock<Element, kWords>& block;
  float (&all)[device::kHeadsPerPass];  // log-sum-exp of every head

  /** The sums of heads from `from` on. */
  __device__ __forceinline__ device::HeadMasses masses(int from) const {
    const HeadScratch& scratch = block.context.scratch;
    const int64_t row = 2 + block.context.shape.value_dim;
    return {scratch.masses + from, scratch.resident + from * row, block.biases(from),
            block.context.shape.group, row};
  }
  /** Of the head whose number is the warp's; of the last one where there is none. */
  __device__ __forceinline__ device::LaneMasses first_masses() const {
    if (block.mean()) return {};
    return masses(0).load(min(device::warp_id(), block.context.shape.group - 1));
  }

  /** The first ones of candidates [first, first + count). */
  __device__ __forceinline__ void look_ahead(int first, int count, LogitsAhead& ahead) const {
    if (block.mean()) return;
    const HeadScratch& scratch = block.context.scratch;
    ahead.load(scratch.estimates + first, block.context.candidate_capacity,
               min(block.context.shape.group, device::kHeadsPerPass), count, int(threadIdx.x));
  }

  /** Leaves worth[i] of candidates [first, first + count). Ends with a barrier. */
  __device__ __forceinline__ void weigh(int first, int count, device::LaneMasses sums,
                                        LogitsAhead& ahead, float* worth) const {
    const HeadScratch& scratch = block.context.scratch;
    const int group = block.context.shape.group;
    const auto leave = [&](int i, float one) {
      worth[i] = one;
      if (block.call.explains) scratch.worth[first + i] = one;
    };
    if (block.mean()) {
      for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
        leave(i, __ldcg(scratch.estimates + first + i));
      }
      __syncthreads();
      return;
    }
    const int64_t stride = block.context.candidate_capacity;
    const float inverse = __frcp_rn(float(group));
#pragma unroll 1
    for (int from = 0; from < group; from += device::kHeadsPerPass) {
      const int heads = min(group - from, device::kHeadsPerPass);
      const float* estimates = scratch.estimates + from * stride + first;
      if (from > 0) {
        ahead.load(estimates, stride, heads, count, int(threadIdx.x));
        sums = masses(from).load(min(device::warp_id(), heads - 1));
        __syncthreads();
      }
      device::sum_up(masses(from), heads, sums, all);
      __syncthreads();
      // A broken query has no say in what the others get.
      const auto share_of = [](float logit, float sum) {
        return device::finite(sum) ? device::share_of(logit, sum) : 0.0f;
      };
      constexpr int kTurns = LogitsAhead::kTurns, kFew = LogitsAhead::kFew;
      float few[kFew];
#pragma unroll
      for (int head = 0; head < kFew; ++head) {
        few[head] = head < heads ? all[head] : device::infinity();
      }
#pragma unroll 1
      for (int begin = int(threadIdx.x); begin < count; begin += kTurns * device::kThreads) {
        float shares[kTurns] = {};
#pragma unroll
        for (int k = 0; k < kTurns; ++k) {
#pragma unroll
          for (int head = 0; head < kFew; ++head) {
            shares[k] += share_of(ahead.logits[k][head], few[head]);
          }
        }
        ahead.load(estimates, stride, heads, count, begin + kTurns * device::kThreads);
#pragma unroll
        for (int k = 0; k < kTurns; ++k) {
          const int i = begin + k * device::kThreads;
          if (i >= count) break;
          float sum = from == 0 ? shares[k] : worth[i] + shares[k];
#pragma unroll 4
          for (int head = kFew; head < heads; ++head) {
            sum += share_of(__ldcg(estimates + head * stride + i), all[head]);
          }
          if (from + heads < group) {
            worth[i] = sum;
          } else {
            leave(i, sum * inverse);
          }
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace pariskv::cuda
