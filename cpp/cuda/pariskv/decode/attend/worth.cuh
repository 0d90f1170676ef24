/**
 * The worth of each candidate: the mean share of its query heads' attention that it would get; with
 * a mean query, its logit. The log-sum-exp of a head is over its resident rows, all candidates and
 * sampled keys that stand for all other keys. Definitions are in worth_impl.cuh.
 */
#pragma once

#include "device/attend.cuh"
#include "pariskv/decode/attend/topk.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/mass.cuh"

namespace pariskv::cuda {

namespace device {

/** The part of a lane in the log-sum-exp of a head. */
struct LaneMasses {
  Mass estimated, resident;
};

}  // namespace device

/** Logits of a few heads that come while there is other work: at first the sums of all heads. */
struct LogitsAhead {
  static constexpr int kTurns = 2, kFew = 4;
  float logits[kTurns][kFew];

  /** Of a thread's next candidates, from `begin` on. */
  __device__ __forceinline__ void load(const float* estimates, int64_t stride, int heads, int count,
                                       int begin);
};

/** Of one block's candidates. All threads call each function. */
template <typename Element, int kWords>
struct Weighing {
  const HeadBlock<Element, kWords>& block;
  float (&all)[device::kHeadsPerPass];  // log-sum-exp of every head

  /** Asks for the masses of the warp's head: head `warp`, or the last one if there are fewer. */
  __device__ __forceinline__ device::LaneMasses first_masses() const;

  /** Asks for the logits of the thread's first candidates of [first, first + count). */
  __device__ __forceinline__ void look_ahead(int first, int count, LogitsAhead& ahead) const;

  /**
   * Leaves worth[i] of candidates [first, first + count). Ends with a barrier.
   * @param sums   as first_masses returned it
   * @param ahead  as look_ahead left it
   */
  __device__ __forceinline__ void weigh(int first, int count, device::LaneMasses sums,
                                        LogitsAhead& ahead, float* worth) const;

  /**
   * Of the best rows, the cut in `select`, keeps those within the call's budget of mass. All blocks
   * of the cluster; ends with a barrier. Definition in budget_impl.cuh.
   * @param worth  (count) as weigh left them
   * @param top_k  where blocks were counting keys, which they are past
   */
  __device__ __forceinline__ void keep_within_budget(const device::Cluster& cluster,
                                                     const float* worth, int count,
                                                     device::CompactSpace& select,
                                                     device::TopKSpace& top_k) const;
};

}  // namespace pariskv::cuda
