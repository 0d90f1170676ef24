/**
 * The worth of each candidate: the mean share of its query heads' attention that it would get; with
 * a mean query, its logit. The log-sum-exp of a head is over its resident rows, all candidates and
 * sampled keys that stand for all other keys.
 */
#pragma once

#include "device/attend.cuh"
#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/sums.cuh"
#include "policy/pariskv/rules.h"

namespace pariskv::cuda {

namespace device {

/** The part of a lane in the log-sum-exp of a head. */
struct LaneMasses {
  Mass estimated, resident;
};

/** The largest over a warp; a NaN that has no sign is larger than everything. */
__device__ __forceinline__ float largest_of_warp(float x) {
  const uint32_t key = __reduce_max_sync(~0u, sortable(x));
  return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/** To about 2^-22; minus infinity for 0. */
__device__ __forceinline__ float log2_of(float x) { return ptx::lg2_approx_ftz(x); }

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
 * @param out    (heads) in shared memory; NaN or infinite where a head does not count
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

/**
 * Worth of a row that is worth next to nothing: it rises with the logit that is nearest to its
 * head's total. Of heads in further passes the last ones count.
 */
inline __device__ __noinline__ float graded(const float* estimate, int64_t stride, int heads,
                                            const float* all) {
  float nearest = -infinity();
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    if (!finite(all[head])) continue;
    nearest = larger(__fsub_rn(__ldcg(estimate + head * stride), all[head]), nearest);
  }
  return __fdiv_rn(kLeastWorth, __fsub_rn(1.0f, nearest));
}

}  // namespace device

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

/** The sums of heads from `from` on. */
template <typename Element, int kWords>
__device__ __forceinline__ device::HeadMasses masses_of(const HeadBlock<Element, kWords>& block,
                                                        int from) {
  const HeadScratch& scratch = block.context.scratch;
  const int64_t row = 2 + block.context.shape.value_dim;
  return {scratch.masses + from, scratch.resident + from * row, block.biases(from),
          block.context.shape.group, row};
}

/** Of one block's candidates. All threads call each function. */
template <typename Element, int kWords>
struct Weighing {
  const HeadBlock<Element, kWords>& block;
  float (&all)[device::kHeadsPerPass];  // log-sum-exp of every head

  /** Asks for the masses of the warp's head: head `warp`, or the last one if there are fewer. */
  __device__ __forceinline__ device::LaneMasses first_masses() const {
    if (block.mean()) return {};
    return masses_of(block, 0).load(min(device::warp_id(), block.context.shape.group - 1));
  }

  /** Asks for the logits of the thread's first candidates of [first, first + count). */
  __device__ __forceinline__ void look_ahead(int first, int count, LogitsAhead& ahead) const {
    if (block.mean()) return;
    const HeadScratch& scratch = block.context.scratch;
    ahead.load(scratch.estimates + first, block.context.candidate_capacity,
               min(block.context.shape.group, device::kHeadsPerPass), count, int(threadIdx.x));
  }

  /**
   * Leaves worth[i] of candidates [first, first + count). Ends with a barrier.
   * @param sums   as first_masses returned it
   * @param ahead  as look_ahead left it
   */
  __device__ __forceinline__ void weigh(int first, int count, device::LaneMasses sums,
                                        LogitsAhead& ahead, float* worth) const {
    const HeadScratch& scratch = block.context.scratch;
    const int group = block.context.shape.group;
    const int64_t stride = block.context.candidate_capacity;
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
    const float inverse = __frcp_rn(float(group));
#pragma unroll 1
    for (int from = 0; from < group; from += device::kHeadsPerPass) {
      const int heads = min(group - from, device::kHeadsPerPass);
      const float* estimates = scratch.estimates + from * stride + first;
      if (from > 0) {
        ahead.load(estimates, stride, heads, count, int(threadIdx.x));
        sums = masses_of(block, from).load(min(device::warp_id(), heads - 1));
        __syncthreads();
      }
      device::sum_up(masses_of(block, from), heads, sums, all);
      __syncthreads();
      // A query that is not finite does not count.
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
            continue;
          }
          float one = sum * inverse;
          if (one < kLeastWorth) one = device::graded(estimates + i, stride, heads, all);
          leave(i, one);
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace pariskv::cuda
