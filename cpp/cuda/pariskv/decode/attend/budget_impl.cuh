/**
 * Weighing::keep_within_budget: of the rows that are among the best, the first ones in the order of
 * their worth, until the rows attended to exactly have their share of the attention
 * (policy/pariskv/budget.h). All blocks of a cluster read the worths of all these rows and find the
 * same cut. The code lies apart, so that calls without a budget do not fetch it.
 */
#pragma once

#include "pariskv/decode/attend/worth_impl.cuh"
#include "policy/pariskv/budget.h"

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

/** The budget of a head, from the sums of its query heads. All threads; ends with a barrier. */
__device__ __forceinline__ MassBudget budget_of_heads(const HeadMasses& masses, int group,
                                                      uint64_t budget, BudgetSpace& space) {
  if (threadIdx.x < kMassRounds) space.digit[threadIdx.x] = -1;
  if (threadIdx.x == 0) {
    space.resident = 0;
    space.heard = 0;
    space.above = space.above_before = space.equal_before = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int head = warp_id(); head < group; head += kWarps) {
    const LaneMasses of = masses.load(head);
    const float top = largest_of_warp(fmaxf(of.estimated.maximum, of.resident.maximum));
    const float shift = top == -infinity() ? 0.0f : top;
    const float resident = warp_sum(of.resident.sum * exp_of(of.resident.maximum - shift));
    const float all = resident + warp_sum(of.estimated.sum * exp_of(of.estimated.maximum - shift));
    if (lane_id() > 0 || !finite(top + log2_of(all))) continue;
    atomicAdd(&space.resident, static_cast<unsigned long long>(mass_of(__fdiv_rn(resident, all))));
    atomicAdd(&space.heard, 1);
  }
  __syncthreads();
  return MassBudget::of(budget, space.resident, space.heard, group);
}

/** The mass of a row, by its worth as `sortable` has it. */
__device__ __forceinline__ uint64_t mass_of_key(uint32_t key) {
  return mass_of(float_of(key ^ 0x80000000u));
}

/** What of the best rows is within the budget, and the mass that is reached with it. */
struct Spent {
  Cut cut;
  uint64_t reached;
};

/**
 * A digit a round, from the highest: the one within which the budget is reached. Then how many of
 * the rows of that very worth are taken. All threads.
 * @param keys  (best.count) worths of all best rows, as `sortable` has them
 */
__device__ __forceinline__ Spent spend(const uint32_t* keys, const Cut& best,
                                       const MassBudget& budget, BudgetSpace& space) {
  uint64_t reached = budget.resident;
  if (reached >= budget.wanted) return {{~0u, 0, 0, 0}, reached};
  const int thread = int(threadIdx.x);
  uint32_t threshold = 0;
#pragma unroll 1
  for (int round = 0; round < kMassRounds; ++round) {
    const int shift = 32 - kMassDigitBits * (round + 1);
    space.bins[thread] = 0;
    __syncthreads();
    const uint32_t known = round == 0 ? 0 : ~0u << (shift + kMassDigitBits);
#pragma unroll 1
    for (int i = thread; i < best.count; i += kThreads) {
      const uint32_t key = __ldcg(keys + i);
      if ((key & known) != threshold) continue;
      atomicAdd(&space.bins[kThreads - 1 - int(key >> shift & (kThreads - 1))],
                static_cast<unsigned long long>(mass_of_key(key)));
    }
    __syncthreads();
    const uint64_t own = space.bins[thread];
    uint64_t sum = own;  // of this bin and all before it
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane_id() >= step) sum += other;
    }
    if (lane_id() == 31) space.warps[warp_id()] = sum;
    __syncthreads();
    uint64_t all = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp == warp_id()) sum += all;
      all += space.warps[warp];
    }
    if (reached + sum >= budget.wanted && reached + sum - own < budget.wanted) {
      space.digit[round] = kThreads - 1 - thread;
      space.before[round] = reached + sum - own;
    }
    __syncthreads();
    if (space.digit[round] < 0) return {best, reached + all};
    reached = space.before[round];
    threshold |= uint32_t(space.digit[round]) << shift;
  }
  const uint64_t each = mass_of_key(threshold);
  const int ties = int((budget.wanted - reached + each - 1) / each);
  uint32_t above = 0, above_before = 0, equal_before = 0;
#pragma unroll 1
  for (int i = thread; i < best.count; i += kThreads) {
    const uint32_t key = __ldcg(keys + i);
    above += key > threshold;
    above_before += key > threshold && i < best.offset;
    equal_before += key == threshold && i < best.offset;
  }
  above = __reduce_add_sync(~0u, above);
  above_before = __reduce_add_sync(~0u, above_before);
  equal_before = __reduce_add_sync(~0u, equal_before);
  if (lane_id() == 0) {
    atomicAdd(&space.above, above);
    atomicAdd(&space.above_before, above_before);
    atomicAdd(&space.equal_before, equal_before);
  }
  __syncthreads();
  const int taken = min(int(space.equal_before), ties);
  return {{threshold, ties - taken, int(space.above_before) + taken, int(space.above) + ties},
          reached + uint64_t(ties) * each};
}

/** What a search leaves of its mass: for `explain`, and in the counters. */
struct MassReport {
  float* share;
  unsigned long long* counters;  // DecodeCounts from `weighed` on; null: not counted

  __device__ __forceinline__ void write(const MassBudget& budget, uint64_t reached) const {
    if (budget.all == 0) {
      *share = float_of(0x7fffffffu);  // no query has a say
      return;
    }
    const int64_t counted = budget.counted(reached);
    *share = float(counted) / float(DecodeCounts::kAllMass);
    if (counters == nullptr) return;
    atomicAdd(counters, 1ull);
    atomicAdd(counters + 1, static_cast<unsigned long long>(counted));
    atomicMax(counters + 2, static_cast<unsigned long long>(DecodeCounts::kAllMass - counted));
  }
};

/** The same for any dtype. */
inline __device__ __noinline__ void keep_within(const HeadMasses masses, const Cluster cluster,
                                                int group, uint64_t budget, const float* worth,
                                                int count, uint32_t* keys, MassReport report,
                                                CompactSpace& select, BudgetSpace& space) {
  const auto key_of = [&](int i) { return sortable(worth[i]); };
  compact_keys(count, key_of, select, [&](int index, int i, int) { keys[index] = key_of(i); });
  cluster.sync();
  const MassBudget own = budget_of_heads(masses, group, budget, space);
  const Cut best = select.cut;
  const Spent spent = spend(keys, best, own, space);
  __syncthreads();
  if (threadIdx.x == 0) {
    select.cut = spent.cut;
    if (cluster.rank == 0) report.write(own, spent.reached);
  }
  __syncthreads();
}

}  // namespace device

template <typename Element, int kWords>
__device__ __forceinline__ void Weighing<Element, kWords>::keep_within_budget(
    const device::Cluster& cluster, const float* worth, int count, device::CompactSpace& select,
    device::TopKSpace& top_k) const {
  const HeadScratch& scratch = block.context.scratch;
  constexpr int kWeighed = int(offsetof(DecodeCounts, weighed) / sizeof(int64_t));
  auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
  device::keep_within(masses_of(block, 0), cluster, block.context.shape.group, block.call.budget,
                      worth, count, scratch.best,
                      {scratch.mass, counters == nullptr ? nullptr : counters + kWeighed}, select,
                      reinterpret_cast<device::BudgetSpace&>(top_k.rows));
}

}  // namespace pariskv::cuda
