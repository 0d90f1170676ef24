/**
 * A budget by the error that a step's sample adds: no more of the best rows are taken than it asks
 * for (policy/pariskv/budget.h). Each block adds up the squares of its candidates by bins of worth,
 * and all blocks of a cluster find the same bin from the sums of all.
 */
#pragma once

#include "device/topk.cuh"
#include "pariskv/decode/attend/worth.cuh"
#include "policy/pariskv/budget.h"

namespace pariskv::cuda {

namespace device {

constexpr int kMostGroup = 1024;

/** Of a block, in shared memory. */
struct BudgetSpace {
  unsigned long long resident, mass, own;  // sums: shares of the heads, of rows; squares
  unsigned long long sampled;              // and of keys that are no candidates
  int finite_heads;
  float all[kMostGroup];  // log-sum-exp of each head

  // By bins of worth (policy/pariskv/budget.h).
  unsigned long long squares[kWorthBins], warp_squares[kWarps];
  int counts[kWorthBins];
  int2 warp_counts[kWarps];
  int enough;         // the highest bin that is enough; 0: none is
  int taken, before;  // rows in it and above, and those of lower blocks
};

static_assert(sizeof(BudgetSpace) <= sizeof(TopKSpace::rows));

/** What a step may leave, of one head. */
struct ErrorAsked {
  double error;  // 0: all of the best rows are taken
  float weight;  // keys that a row of the sample stands for
  int group;
  const ErrorParts* samples;  // (heads); null: keys that are no candidates are not looked at
  float keys;                 // of how many each of these is one
};

/** The squares of a head's shares that sampled keys would have. A warp. */
__device__ __forceinline__ uint64_t squares_of_samples(const float* logits, float all) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < int(kSampledKeys); i += 32) {
    const float logit = __ldcg(logits + i + lane_id());
    const float share = logit == -infinity() ? 0.0f : share_of(logit, all);
    sum += square_of(share * share);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

/**
 * The budget of a head, from the sums of its query heads, whose log-sum-exps are left in the space.
 * All threads; ends with a barrier.
 */
__device__ __forceinline__ ErrorBudget budget_of_heads(const HeadMasses& masses,
                                                       const ErrorAsked& asked,
                                                       BudgetSpace& space) {
  if (threadIdx.x == 0) {
    space.resident = space.mass = space.own = space.sampled = 0;
    space.finite_heads = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int head = warp_id(); head < asked.group; head += kWarps) {
    const LaneMasses of = masses.load(head);
    const float top = largest_of_warp(fmaxf(of.estimated.maximum, of.resident.maximum));
    const float shift = top == -infinity() ? 0.0f : top;
    const float resident = warp_sum(of.resident.sum * exp_of(of.resident.maximum - shift));
    const float all = resident + warp_sum(of.estimated.sum * exp_of(of.estimated.maximum - shift));
    const float total = top + log2_of(all) * 0.693147180559945309f;
    uint64_t sampled = 0;
    if (asked.samples != nullptr) {
      sampled = squares_of_samples(asked.samples[head].samples, total);
    }
    if (lane_id() > 0) continue;
    space.all[head] = total;
    if (!finite(total)) continue;
    atomicAdd(&space.sampled, static_cast<unsigned long long>(sampled));
    atomicAdd(&space.resident, static_cast<unsigned long long>(mass_of(__fdiv_rn(resident, all))));
    atomicAdd(&space.finite_heads, 1);
  }
  __syncthreads();
  return ErrorBudget::of(
      asked.error, asked.weight,
      {space.finite_heads, asked.group, space.resident, space.sampled, asked.keys});
}

/** What is known of a block's candidates, from its first one on. */
struct CandidateEstimates {
  const float* logits;  // (heads, stride)
  int64_t stride;
  const float* scales;       // of their weights; null: logits are taken as exact
  const ErrorParts* errors;  // (heads)
};

/** Squares of the shares of candidates, mean over the heads of a group, in units. */
struct Squares {
  CandidateEstimates estimates;
  int group;
  const float* all;  // (heads)

  __device__ __forceinline__ uint64_t operator()(int i) const {
    const float scale = estimates.scales == nullptr ? 0.0f : __ldcg(estimates.scales + i);
    float sum = 0;
#pragma unroll 4
    for (int head = 0; head < group; ++head) {
      const float logit = __ldcg(estimates.logits + head * estimates.stride + i);
      const float spread = scale == 0 ? 0.0f : __ldcg(&estimates.errors[head].noise) * scale;
      const float raised = fminf(logit + spread * spread, all[head]);
      const float share = finite(all[head]) ? share_of(raised, all[head]) : 0.0f;
      sum += share * share;
    }
    return square_of(sum * __frcp_rn(float(group)));
  }
};

/** The mass of a row, by its worth as `sortable` has it. */
__device__ __forceinline__ uint64_t mass_of_key(uint32_t key) {
  return mass_of(float_of(key ^ 0x80000000u));
}

/** Adds what all threads of a block have, in any order. */
__device__ __forceinline__ void add_of_block(unsigned long long& sum, uint64_t own) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(~0u, own, step);
  if (lane_id() == 0) atomicAdd(&sum, static_cast<unsigned long long>(own));
}

/** Where a search leaves its mass and its error: for `explain`, the caller, in the counters. */
struct ErrorReport {
  float* reached;                // (2) mass and error
  float* error;                  // null: not wanted
  unsigned long long* counters;  // DecodeCounts from `weighed` on; null: not counted

  __device__ __forceinline__ void write_mass(const ErrorBudget& budget, uint64_t mass) const {
    const int64_t counted = budget.all == 0 ? 0 : budget.counted(mass);
    reached[0] = budget.all == 0 ? none() : float(counted) / float(DecodeCounts::kOne);
    if (counters == nullptr || budget.all == 0) return;
    atomicAdd(counters, 1ull);
    atomicAdd(counters + 1, static_cast<unsigned long long>(counted));
    atomicMax(counters + 2, static_cast<unsigned long long>(DecodeCounts::kOne - counted));
  }
  /** @param variance  that the sample has added */
  __device__ __forceinline__ void write_error(const ErrorBudget& budget, float variance) const {
    const float told = budget.all == 0 ? none() : __fsqrt_rn(variance);
    reached[1] = told;
    if (error != nullptr) *error = told;
    if (counters == nullptr || budget.all == 0) return;
    const auto units = static_cast<unsigned long long>(told * float(DecodeCounts::kOne));
    atomicAdd(counters + 3, units);
    atomicMax(counters + 4, units);
  }

 private:
  /** No query is finite. */
  static __device__ __forceinline__ float none() { return float_of(0x7fffffffu); }
};

/** What a head's error is made of, when its rows are chosen. */
struct ErrorLeft {
  ErrorBudget budget;
  uint64_t mass;     // of the resident and the selected rows
  uint64_t squares;  // of candidates that are left
};

/** Where blocks leave one another sums by bins of worth, in scratch. */
struct SharedBins {
  uint64_t* squares;  // (kMaxCluster, kWorthBins)
  int32_t* counts;    // the same; none of the first bin

  /** Threads are bins, the highest first: sums over blocks. */
  __device__ __forceinline__ void add_up(const Cluster& cluster, int bin, uint64_t& sum,
                                         int2& rows) const {
#pragma unroll 4
    for (int block = 0; block < cluster.size; ++block) {
      const int at = block * kWorthBins + bin;
      const int some = __ldcg(counts + at);
      sum += __ldcg(reinterpret_cast<const unsigned long long*>(squares) + at);
      rows.x += some;
      rows.y += block < cluster.rank ? some : 0;
    }
  }
};

/** How many rows a budget asks for. */
struct WantedRows {
  Cut cut;     // of whole bins; where it is known
  int wanted;  // else: so many of the best; 0: the cut is known
};

/** Leaves in the space which bin is the last one that is taken. All threads. */
__device__ __forceinline__ void find_bin_of_budget(const Cluster& cluster, const SharedBins& shared,
                                                   const ErrorBudget& budget, BudgetSpace& space) {
  const int thread = int(threadIdx.x), bin = kWorthBins - 1 - thread;
  uint64_t squares = 0;
  int2 rows{};  // of all blocks, of lower ones
  if (bin >= 0) shared.add_up(cluster, bin, squares, rows);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, squares, step);
    const int all = __shfl_up_sync(~0u, rows.x, step), before = __shfl_up_sync(~0u, rows.y, step);
    if (lane_id() >= step) squares += other, rows.x += all, rows.y += before;
  }
  if (lane_id() == 31) {
    space.warp_squares[warp_id()] = squares;
    space.warp_counts[warp_id()] = rows;
  }
  __syncthreads();
  uint64_t total = 0;
#pragma unroll
  for (int warp = 0; warp < kWorthBins / 32; ++warp) {
    if (warp < warp_id()) {
      squares += space.warp_squares[warp];
      rows.x += space.warp_counts[warp].x;
      rows.y += space.warp_counts[warp].y;
    }
    total += space.warp_squares[warp];
  }
  const bool enough = bin > 0 && total - squares <= budget.may_stay;
  const uint32_t those = __ballot_sync(~0u, enough);
  if (those != 0 && lane_id() == __ffs(int(those)) - 1) atomicMax(&space.enough, bin);
  __syncthreads();
  if (bin > 0 && bin == space.enough) space.taken = rows.x, space.before = rows.y;
  __syncthreads();
}

/**
 * How many of a head's candidates are taken. A function of its own, so that calls without a budget
 * do not fetch it. All blocks of the cluster; ends with a barrier.
 * @param worth  (count) of the block's candidates
 * @param most   rows that may be taken
 */
inline __device__ __noinline__ WantedRows rows_within(const HeadMasses masses,
                                                      const Cluster cluster, const ErrorAsked asked,
                                                      const float* worth,
                                                      const CandidateEstimates estimates, int count,
                                                      int most, SharedBins shared,
                                                      BudgetSpace& space) {
  const int thread = int(threadIdx.x);
  if (thread < kWorthBins) space.squares[thread] = 0, space.counts[thread] = 0;
  if (thread == kWorthBins) space.enough = 0;
  const ErrorBudget budget = budget_of_heads(masses, asked, space);
  const Squares square{estimates, asked.group, space.all};
  uint64_t low = 0;  // most are worth little, and nobody asks how many these are
#pragma unroll 1
  for (int i = thread; i < count; i += kThreads) {
    const uint64_t own = square(i);
    const int bin = worth_bin(__float_as_uint(worth[i]));
    if (bin == 0) {
      low += own;
      continue;
    }
    atomicAdd(&space.squares[bin], static_cast<unsigned long long>(own));
    atomicAdd(&space.counts[bin], 1);
  }
  add_of_block(space.squares[0], low);
  __syncthreads();
  if (thread < kWorthBins) {
    const int at = cluster.rank * kWorthBins + thread;
    shared.squares[at] = space.squares[thread];
    shared.counts[at] = space.counts[thread];
  }
  cluster.sync();
  find_bin_of_budget(cluster, shared, budget, space);
  const bool enough = space.enough > 0;
  if (enough && space.taken < budget.least) {
    return {{}, budget.least < most ? int(budget.least) : most};
  }
  if (!enough || space.taken > most) return {{}, most};
  const uint32_t above = sortable(float_of(least_of_bin(space.enough))) - 1;
  return {{above, 0, space.before, space.taken}, 0};
}

}  // namespace device

/** Where the error of a block's head is wanted; null: it is not. */
template <typename Element, int kWords>
__device__ __forceinline__ float* error_of(const HeadBlock<Element, kWords>& block) {
  const DecodeCall& call = block.call;
  if (call.error == nullptr) return nullptr;
  return call.error + block.context.row * call.error_stride + block.context.head;
}

template <typename Element, int kWords>
__device__ __forceinline__ device::ErrorReport report_of(const HeadBlock<Element, kWords>& block) {
  constexpr int kWeighed = int(offsetof(DecodeCounts, weighed) / sizeof(int64_t));
  auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
  return {block.context.scratch.reached, error_of(block),
          counters == nullptr ? nullptr : counters + kWeighed};
}

/** The step's wish for a block's head. */
template <typename Element, int kWords>
__device__ __forceinline__ device::ErrorAsked asked_of(const HeadBlock<Element, kWords>& block,
                                                       const Tail& tail) {
  const device::Zone& zone = block.context.zone;
  const int keys = zone.end - zone.begin;
  return {block.call.error_left, weight_of(zone, tail), block.context.shape.group,
          block.call.looks_beyond ? block.context.scratch.errors : nullptr,
          __fdiv_rn(float(keys), float(min(keys, int(kSampledKeys))))};
}

/** Estimates of its candidates, from number `first` on. */
template <typename Element, int kWords>
__device__ __forceinline__ device::CandidateEstimates estimates_of(
    const HeadBlock<Element, kWords>& block, int first) {
  const HeadScratch& scratch = block.context.scratch;
  return {scratch.estimates + first, block.context.candidate_capacity,
          block.call.error_left > 0 ? scratch.scales + first : nullptr, scratch.errors};
}

/**
 * How many candidates the call's budget asks for. All blocks of the cluster; ends with a barrier.
 * @param first  number of the block's first candidate
 * @param worth  (count) as Weighing::weigh left them
 * @param top_k  where blocks count keys, which nobody does yet
 */
template <typename Element, int kWords>
__device__ __forceinline__ device::WantedRows rows_within_budget(
    const HeadBlock<Element, kWords>& block, const device::Cluster& cluster, const Tail& tail,
    int first, int count, const float* worth, device::TopKSpace& top_k) {
  const HeadScratch& scratch = block.context.scratch;
  return device::rows_within(masses_of(block, 0), cluster, asked_of(block, tail), worth,
                             estimates_of(block, first), count, int(block.call.top_k),
                             {scratch.bin_squares, scratch.bin_counts},
                             reinterpret_cast<device::BudgetSpace&>(top_k.rows));
}

}  // namespace pariskv::cuda
