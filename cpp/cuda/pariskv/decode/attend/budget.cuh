/**
 * A budget by mass (policy/pariskv/budget.h): of the rows that are among the best, the first ones
 * in the order of their worth, until what is attended to exactly has its share of the attention.
 * All blocks of a cluster read the worths of all these rows and find the same cut. Only where a
 * call has a budget; the code lies apart, so that other calls do not fetch it. Definitions are in
 * budget_impl.cuh.
 */
#pragma once

#include "pariskv/decode/attend/topk.cuh"
#include "pariskv/decode/context.cuh"

namespace pariskv::cuda {

namespace device {

/** Bits of a worth that are looked at together. */
constexpr int kMassDigitBits = 8;
constexpr int kMassRounds = 32 / kMassDigitBits;

/** Of a block, in shared memory. */
struct BudgetSpace {
  unsigned long long bins[kThreads];  // masses of rows by a digit of their worth, highest first
  unsigned long long warps[kWarps];   // and of all bins of a warp
  unsigned long long before[kMassRounds];      // of rows above the digit that was found
  unsigned long long resident;                 // sum over heads with a say
  int heard;                                   // how many these are
  int digit[kMassRounds];                      // that was found; -1: rows are not enough
  uint32_t above, above_before, equal_before;  // rows; of lower blocks
};
static_assert(kThreads == 1 << kMassDigitBits, "a thread for each bin");
static_assert(sizeof(BudgetSpace) <= sizeof(TopKSpace::rows));

}  // namespace device

/**
 * Makes the cut in `select`, of the best rows, one of those within the budget. All threads of all
 * blocks of the cluster; ends with a barrier.
 * @param worth  (count) of this block's candidates
 */
template <typename Element, int kWords>
__device__ __forceinline__ void keep_within_budget(const HeadBlock<Element, kWords>& block,
                                                   const device::Cluster& cluster,
                                                   const float* worth, int count,
                                                   device::CompactSpace& select,
                                                   device::BudgetSpace& space);

}  // namespace pariskv::cuda
