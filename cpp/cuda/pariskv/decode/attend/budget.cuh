/**
 * A budget by the error that a step's sample adds: no more of the best rows are taken than it asks
 * for (policy/pariskv/budget.h). While a block weighs its candidates it adds up their squares, by
 * bins of worth; all blocks of a cluster find the same bin from the sums of all. Where only the
 * error is wanted, nothing is cut.
 */
#pragma once

#include "device/topk.cuh"
#include "pariskv/decode/attend/worth.cuh"
#include "policy/pariskv/budget.h"

namespace pariskv::cuda {

namespace device {

/** By bins of worth (policy/pariskv/budget.h): of a block, in shared memory. */
struct BudgetSpace {
  unsigned long long squares[kWorthBins], warp_squares[kWarps];
  int counts[kWorthBins];
  int2 warp_counts[kWarps];
  int enough;         // the highest bin that is enough; 0: none is
  int taken, before;  // rows in it and above, and those of lower blocks
};

static_assert(sizeof(BudgetSpace) <= sizeof(TopKSpace::rows));

/** The sums that make a step's error, before attention: of a block, in shared memory. */
struct ErrorSums {
  unsigned long long resident, sampled;  // of all heads: shares of resident rows; squares of keys
                                         // that are no candidates
  unsigned long long squares, mass;      // of candidates, less those of selected ones; of these
  int finite_heads;
  ErrorBudget budget;
  float* of_candidates;  // squares of each one's shares, means over the heads

  /** Candidate i is selected, a row of this mass. */
  __device__ __forceinline__ void select(int i, uint64_t of_row) {
    atomicAdd(&mass, static_cast<unsigned long long>(of_row));
    atomicAdd(&squares, 0 - static_cast<unsigned long long>(square_of(of_candidates[i])));
  }
};

/** What a step may leave, of one head. */
struct ErrorAsked {
  double error;  // 0: all of the best rows are taken
  float weight;  // keys that a row of the sample stands for
  int group;
  const ErrorParts* heads;  // (heads)
  bool looks_beyond;        // at keys that are no candidates
  float keys;               // of how many each of these is one

  __device__ __forceinline__ ErrorBudget budget(const ErrorSums& sums) const {
    return ErrorBudget::of(error, weight,
                           {sums.finite_heads, group, sums.resident, sums.sampled, keys});
  }
};

/** Adds what a warp's lanes have: sums of pieces are one instruction each. */
__device__ __forceinline__ void add_of_warp(unsigned long long& sum, uint64_t own) {
  constexpr uint32_t kPiece = (1u << 24) - 1;
  const uint64_t low = __reduce_add_sync(~0u, uint32_t(own) & kPiece);
  const uint64_t middle = __reduce_add_sync(~0u, uint32_t(own >> 24) & kPiece);
  const uint64_t high = __reduce_add_sync(~0u, uint32_t(own >> 48));
  if (lane_id() == 0) atomicAdd(&sum, low + (middle << 24) + (high << 48));
}

/** Numbers of every head of a group, in shared memory. */
struct HeadSums {
  float* all;    // (heads) log-sum-exp: NaN or infinite where a head does not count
  float* noise;  // (heads) of its estimates; see ErrorParts

  __device__ __forceinline__ HeadSums(char* at, int heads)
      : all(reinterpret_cast<float*>(at)), noise(all + heads) {}
};

/** The squares of a head's shares that sampled keys would have: a lane's. */
struct SampledShares {
  float logits[kSampledKeys / 32];

  __device__ __forceinline__ explicit SampledShares(const float* samples) {
#pragma unroll
    for (int i = 0; i < int(kSampledKeys) / 32; ++i) {
      logits[i] = samples == nullptr ? -infinity() : __ldcg(samples + 32 * i + lane_id());
    }
  }
  __device__ __forceinline__ uint64_t squares(float all) const {
    uint64_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < int(kSampledKeys) / 32; ++i) {
      const float share = share_of(logits[i], all);
      sum += logits[i] == -infinity() ? 0 : square_of(share * share);
    }
    return sum;
  }
};

/** Log-sum-exps of all heads, a warp for each, and the sums over heads that a budget asks for. */
__device__ __forceinline__ void sum_heads(const HeadMasses& masses, const ErrorAsked& asked,
                                          const HeadSums& out, ErrorSums& sums) {
#pragma unroll 1
  for (int head = warp_id(); head < asked.group; head += kWarps) {
    const LaneMasses of = masses.load(head);
    const ErrorParts& parts = asked.heads[head];
    const SampledShares sampled(asked.looks_beyond ? parts.samples : nullptr);
    const float noise = asked.looks_beyond ? __ldcg(&parts.noise) : 0.0f;
    const float top = largest_of_warp(fmaxf(of.estimated.maximum, of.resident.maximum));
    const float shift = top == -infinity() ? 0.0f : top;
    float resident = of.resident.sum * exp_of(of.resident.maximum - shift);
    const float sum = warp_sum(of.estimated.sum * exp_of(of.estimated.maximum - shift) + resident);
    resident = warp_sum(resident);
    const float all = top + log2_of(sum) * 0.693147180559945309f;
    if (lane_id() == 0) out.all[head] = all, out.noise[head] = noise;
    if (!finite(all)) continue;
    if (asked.looks_beyond) add_of_warp(sums.sampled, sampled.squares(all));
    if (lane_id() > 0) continue;
    atomicAdd(&sums.resident, static_cast<unsigned long long>(mass_of(__fdiv_rn(resident, sum))));
    atomicAdd(&sums.finite_heads, 1);
  }
}

/** Shares of a candidate. */
struct Shares {
  float sum, squares;  // over the heads

  /**
   * @param logits  (heads) `stride` apart
   * @param scale   of the candidate's weights; 0: logits are taken as exact
   */
  __device__ __forceinline__ Shares(const float* logits, int64_t stride, int heads,
                                    const HeadSums& of, float scale)
      : sum(0), squares(0) {
#pragma unroll 4
    for (int head = 0; head < heads; ++head) {
      const float logit = __ldcg(logits + head * stride), all = of.all[head];
      const float spread = scale == 0 ? 0.0f : of.noise[head] * scale;
      const float share = share_of(logit, all);
      const float raised = share_of(fminf(logit + spread * spread, all), all);
      // A query that is not finite does not count.
      sum += finite(all) ? share : 0.0f;
      squares += finite(all) ? raised * raised : 0.0f;
    }
  }
};

/** The mass of a row, by its worth as `sortable` has it. */
__device__ __forceinline__ uint64_t mass_of_key(uint32_t key) {
  return mass_of(float_of(key ^ 0x80000000u));
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

/** Where blocks leave one another sums by bins of worth, in scratch. */
struct SharedBins {
  uint64_t* squares;  // (kMaxCluster, kWorthBins)
  int32_t* counts;    // the same, behind them; none of the first bin

  explicit __device__ __forceinline__ SharedBins(uint64_t* bins)
      : squares(bins), counts(reinterpret_cast<int32_t*>(bins + kMaxCluster * kWorthBins)) {}

  __device__ __forceinline__ void leave(const Cluster& cluster, const BudgetSpace& space) const {
    if (int(threadIdx.x) >= kWorthBins) return;
    const int at = cluster.rank * kWorthBins + int(threadIdx.x);
    squares[at] = space.squares[threadIdx.x];
    counts[at] = space.counts[threadIdx.x];
  }
  /** Sums of a bin over blocks: in one trip to memory. */
  __device__ __forceinline__ void add_up(const Cluster& cluster, int bin, uint64_t& sum,
                                         int2& rows) const {
#pragma unroll
    for (int block = 0; block < kMaxCluster; ++block) {
      const int at = block * kWorthBins + bin;
      const bool has = block < cluster.size;
      const int some = has ? __ldcg(counts + at) : 0;
      sum += has ? __ldcg(reinterpret_cast<const unsigned long long*>(squares) + at) : 0;
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

/** Leaves in the space which bin is the last one that is taken. All threads, the highest bin first.
 */
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
 * How many of a head's candidates are taken, once they are weighed. A function of its own, so that
 * calls without a budget do not fetch it. All blocks of the cluster; ends with a barrier.
 * @param most  rows that may be taken
 * @param sums  gets the budget
 */
inline __device__ __noinline__ WantedRows rows_within(const Cluster cluster, const ErrorAsked asked,
                                                      int most, const SharedBins shared,
                                                      ErrorSums& sums, BudgetSpace& space) {
  shared.leave(cluster, space);
  cluster.arrive();
  const ErrorBudget budget = asked.budget(sums);
  if (threadIdx.x == 0) sums.budget = budget;
  cluster.wait();
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
  return {block.call.error_left,     weight_of(zone, tail),
          block.context.shape.group, block.context.scratch.errors,
          block.call.looks_beyond,   __fdiv_rn(float(keys), float(min(keys, int(kSampledKeys))))};
}

/** The candidates of `weigh_and_tell` and its results. */
struct Weighed {
  int first, count;
  float* worth;    // (count) as Weighing leaves it
  float* squares;  // (count) of shares, means over the heads
};

/**
 * Weighs a block's candidates, as Weighing does, and adds up the parts of the error. A function of
 * its own, as `rows_within`; short, as code comes from memory when a call needs it. All threads;
 * ends with a barrier.
 * @param head_sums  shared memory, head_sums_bytes
 * @param bins       null: there is no budget
 */
inline __device__ __noinline__ void weigh_and_tell(const DecodeCall& call,
                                                   const HeadContext& context,
                                                   const device::HeadMasses masses,
                                                   const device::ErrorAsked asked, char* head_sums,
                                                   const Weighed out, device::ErrorSums& sums,
                                                   device::BudgetSpace* bins) {
  const int thread = int(threadIdx.x);
  if (bins != nullptr) {
    if (thread < kWorthBins) bins->squares[thread] = 0, bins->counts[thread] = 0;
    if (thread == kWorthBins) bins->enough = 0;
  }
  if (thread == 0) sums = {}, sums.of_candidates = out.squares;
  __syncthreads();
  const device::HeadSums heads(head_sums, asked.group);
  device::sum_heads(masses, asked, heads, sums);
  __syncthreads();
  const HeadScratch& scratch = context.scratch;
  const int64_t stride = context.candidate_capacity;
  const float inverse = __frcp_rn(float(asked.group));
  uint64_t all = 0, low = 0;  // most are worth too little for a bin
#pragma unroll 1
  for (int i = thread; i < out.count; i += device::kThreads) {
    const float* logits = scratch.estimates + out.first + i;
    const float scale = bins == nullptr ? 0.0f : __ldcg(scratch.scales + out.first + i);
    const device::Shares shares(logits, stride, asked.group, heads, scale);
    const float mean = shares.squares * inverse;
    float worth = shares.sum * inverse;
    if (worth < kLeastWorth) {
      const int from = (asked.group - 1) / device::kHeadsPerPass * device::kHeadsPerPass;
      worth = device::graded(logits + from * stride, stride, asked.group - from, heads.all + from);
    }
    out.worth[i] = worth;
    out.squares[i] = mean;
    if (call.explains) scratch.worth[out.first + i] = worth;
    const uint64_t square = square_of(mean);
    all += square;
    if (bins == nullptr) continue;
    const int bin = worth_bin(__float_as_uint(worth));
    low += bin == 0 ? square : 0;
    if (bin == 0) continue;
    atomicAdd(&bins->squares[bin], static_cast<unsigned long long>(square));
    atomicAdd(&bins->counts[bin], 1);
  }
  device::add_of_warp(sums.squares, all);
  if (bins != nullptr) device::add_of_warp(bins->squares[0], low);
  __syncthreads();
}

}  // namespace pariskv::cuda
