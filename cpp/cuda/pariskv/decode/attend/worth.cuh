/**
 * The worth of each candidate: the mean share of its query heads' attention that it would get; with
 * a mean query, its logit. The log-sum-exp of a head is over its resident rows, all candidates and
 * sampled keys that stand for all other keys.
 */
#pragma once

#include "device/attend.cuh"
#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "device/topk.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/sums.cuh"
#include "policy/pariskv/budget.h"
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

namespace device {

// A budget of mass.

/** Bits of a worth that are looked at together. */
constexpr int kMassDigitBits = 8;
constexpr int kMassRounds = 32 / kMassDigitBits;

/** Of a block, in shared memory. */
struct BudgetSpace {
  unsigned long long bins[kThreads];  // masses of rows by a digit of their worth, highest first
  unsigned long long warps[kWarps];   // and of all bins of a warp
  unsigned long long before[kMassRounds];      // of rows above the digit that was found
  unsigned long long resident;                 // sum over heads that count
  int finite_heads;                            // how many these are
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
    space.finite_heads = 0;
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
    atomicAdd(&space.finite_heads, 1);
  }
  __syncthreads();
  return MassBudget::of(budget, space.resident, space.finite_heads, group);
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
      *share = float_of(0x7fffffffu);  // no query is finite
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

/**
 * Of the best rows, the first ones in the order of their worth, until the rows attended to exactly
 * have their share of the attention (policy/pariskv/budget.h). All blocks of a cluster read the
 * worths of all these rows and find the same cut. A function of its own, so that calls without a
 * budget do not fetch it.
 */
inline __device__ __noinline__ void cut_to_mass(const HeadMasses masses, const Cluster cluster,
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

  /**
   * Cuts the best rows, as `select` has them, to the call's budget of mass. All blocks
   * of the cluster; ends with a barrier.
   * @param worth  (count) as weigh left them
   * @param top_k  where blocks were counting keys, which they are past
   */
  __device__ __forceinline__ void cut_to_budget(const device::Cluster& cluster, const float* worth,
                                                int count, device::CompactSpace& select,
                                                device::TopKSpace& top_k) const {
    const HeadScratch& scratch = block.context.scratch;
    constexpr int kWeighed = int(offsetof(DecodeCounts, weighed) / sizeof(int64_t));
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    device::cut_to_mass(masses_of(block, 0), cluster, block.context.shape.group, block.call.budget,
                        worth, count, scratch.best,
                        {scratch.mass, counters == nullptr ? nullptr : counters + kWeighed}, select,
                        reinterpret_cast<device::BudgetSpace&>(top_k.rows));
  }
};

}  // namespace pariskv::cuda
