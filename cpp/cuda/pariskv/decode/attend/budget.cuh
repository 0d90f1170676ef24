/**
 * A budget by the error that a step's sample adds: of the best rows, in the order of their worth,
 * no more are taken than the budget asks for (policy/pariskv/budget.h). All blocks of a cluster
 * read the worths and squares of all these rows and find the same cut.
 */
#pragma once

#include "device/topk.cuh"
#include "pariskv/decode/attend/worth.cuh"
#include "policy/pariskv/budget.h"

namespace pariskv::cuda {

namespace device {

/** A row of the best ones comes before another if its place is lower: worth, then index. */
constexpr int kPlaceBits = 64, kPlaceDigitBits = 8;
constexpr int kPlaceRounds = kPlaceBits / kPlaceDigitBits;
constexpr int kMostGroup = 1024;

/** Of a block, in shared memory. */
struct BudgetSpace {
  unsigned long long bins[kThreads];            // squares of rows by a digit of their place
  unsigned long long warps[kWarps];             // and of all bins of a warp
  int rows[kThreads], warp_rows[kWarps];        // the same for the number of rows
  unsigned long long squares_of[kPlaceRounds];  // of rows in bins before the one that was found
  int rows_of[kPlaceRounds];                    // how many these are
  int digit[kPlaceRounds];                      // that was found; -1: all rows are taken
  int alone[kPlaceRounds];                      // nothing else is in that bin
  unsigned long long resident, mass, own;       // sums: shares of the heads, of rows; squares
  unsigned long long sampled;                   // and of keys that are no candidates
  int finite_heads;
  uint32_t last, above, above_before, equal, equal_before;  // worth of the last row; rows
  int last_index;
  float all[kMostGroup];  // log-sum-exp of each head
};

static_assert(kThreads == 1 << kPlaceDigitBits, "a thread for each bin");

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
  if (threadIdx.x < kPlaceRounds) space.digit[threadIdx.x] = -1;
  if (threadIdx.x == 0) {
    space.resident = space.mass = space.own = space.sampled = 0;
    space.finite_heads = 0;
    space.above = space.above_before = space.equal = space.equal_before = 0;
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

/** The best rows of a head, in scratch. */
struct BestRows {
  const uint32_t* keys;  // worths, as `sortable` has them
  const uint64_t* squares;
  Cut cut;  // this block's, of them

  __device__ __forceinline__ uint32_t key(int i) const { return __ldcg(keys + i); }
  __device__ __forceinline__ uint64_t square(int i) const {
    return __ldcg(reinterpret_cast<const unsigned long long*>(squares) + i);
  }
  __device__ __forceinline__ uint64_t place(int i) const {
    return uint64_t(~key(i)) << 32 | uint32_t(i);
  }
};

/** What of the best rows is taken, their mass and squares. */
struct Spent {
  Cut cut;
  uint64_t mass, squares;
};

/** The sums of threads up to each one, and over all. */
struct ThreadSums {
  uint64_t squares, all_squares;
  int rows, all_rows;
};
__device__ __forceinline__ ThreadSums add_bins(BudgetSpace& space) {
  ThreadSums sums{space.bins[threadIdx.x], 0, space.rows[threadIdx.x], 0};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t squares = __shfl_up_sync(~0u, sums.squares, step);
    const int rows = __shfl_up_sync(~0u, sums.rows, step);
    if (lane_id() >= step) sums.squares += squares, sums.rows += rows;
  }
  if (lane_id() == 31) {
    space.warps[warp_id()] = sums.squares;
    space.warp_rows[warp_id()] = sums.rows;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == warp_id()) sums.squares += sums.all_squares, sums.rows += sums.all_rows;
    sums.all_squares += space.warps[warp];
    sums.all_rows += space.warp_rows[warp];
  }
  return sums;
}

/**
 * A digit of places a round, from the highest: the one with the last row that the budget asks for,
 * until nothing else has it. All threads.
 * @param wanted  squares that are to be taken, of `budget.least` rows or more
 */
__device__ __forceinline__ Spent spend(const BestRows& best, const ErrorBudget& budget,
                                       uint64_t wanted, BudgetSpace& space) {
  const int thread = int(threadIdx.x), count = best.cut.count;
  uint64_t known = 0, squares = 0;  // of the last row's place; of rows before
  int rows = 0, shift = kPlaceBits;
  bool all = false;
#pragma unroll 1
  for (int round = 0; round < kPlaceRounds; ++round) {
    const uint64_t above = round == 0 ? 0 : ~uint64_t{0} << shift;
    shift -= kPlaceDigitBits;
    space.bins[thread] = 0;
    space.rows[thread] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < count; i += kThreads) {
      const uint64_t place = best.place(i);
      if ((place & above) != known) continue;
      const int bin = int(place >> shift & (kThreads - 1));
      atomicAdd(&space.bins[bin], static_cast<unsigned long long>(best.square(i)));
      atomicAdd(&space.rows[bin], 1);
    }
    __syncthreads();
    const uint64_t own = space.bins[thread];
    const int own_rows = space.rows[thread];
    const ThreadSums sums = add_bins(space);
    const auto enough = [&](uint64_t taken, int many) {
      return squares + taken >= wanted && rows + many >= budget.least;
    };
    const bool before = enough(sums.squares - own, sums.rows - own_rows);
    if (enough(sums.squares, sums.rows) && !before && own_rows > 0) {
      space.digit[round] = thread;
      space.alone[round] = own_rows == 1;
      space.squares_of[round] = squares + sums.squares - own;
      space.rows_of[round] = rows + sums.rows - own_rows;
    }
    __syncthreads();
    all = space.digit[round] < 0;
    if (all) {
      squares += sums.all_squares;
      break;
    }
    squares = space.squares_of[round];
    rows = space.rows_of[round];
    known |= uint64_t(space.digit[round]) << shift;
    if (space.alone[round]) break;
  }
  uint64_t mass = 0;
#pragma unroll 1
  for (int i = thread; i < count; i += kThreads) {
    const uint64_t place = best.place(i) >> shift;
    if (!all && place > known >> shift) continue;
    mass += mass_of_key(best.key(i));
    if (all || place != known >> shift) continue;
    space.last = best.key(i);
    space.last_index = i;
  }
  add_of_block(space.mass, mass);
  __syncthreads();
  mass = budget.resident + space.mass;
  if (all) return {best.cut, mass, squares};
  squares += best.square(space.last_index);
  const uint32_t last = space.last;
  const int last_index = space.last_index, offset = best.cut.offset;
  uint32_t above = 0, above_before = 0, equal = 0, equal_before = 0;
#pragma unroll 1
  for (int i = thread; i < count; i += kThreads) {
    const uint32_t key = best.key(i);
    above += key > last;
    above_before += key > last && i < offset;
    equal += key == last && i <= last_index;
    equal_before += key == last && i <= last_index && i < offset;
  }
  above = __reduce_add_sync(~0u, above);
  above_before = __reduce_add_sync(~0u, above_before);
  equal = __reduce_add_sync(~0u, equal);
  equal_before = __reduce_add_sync(~0u, equal_before);
  if (lane_id() == 0) {
    atomicAdd(&space.above, above);
    atomicAdd(&space.above_before, above_before);
    atomicAdd(&space.equal, equal);
    atomicAdd(&space.equal_before, equal_before);
  }
  __syncthreads();
  return {{last, int(space.equal - space.equal_before),
           int(space.above_before + space.equal_before), int(space.above + space.equal)},
          mass,
          squares};
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

/** Where blocks leave their best rows and sums for one another, in scratch. */
struct SharedBest {
  uint32_t* keys;     // (rows) worths, as `sortable` has them
  uint64_t* squares;  // (rows)
  uint64_t* totals;   // (kMaxCluster) squares of each block's candidates
};

/**
 * Cuts the best rows, as `select` has them, to the budget. A function of its own, so that calls
 * without one do not fetch it. All blocks of the cluster; ends with a barrier.
 * @param worth  (count) of the block's candidates
 */
inline __device__ __noinline__ void cut_to_error(const HeadMasses masses, const Cluster cluster,
                                                 const ErrorAsked asked, const float* worth,
                                                 const CandidateEstimates estimates, int count,
                                                 SharedBest shared, ErrorLeft& left,
                                                 CompactSpace& select, BudgetSpace& space) {
  const ErrorBudget own = budget_of_heads(masses, asked, space);
  const Squares square{estimates, asked.group, space.all};
  uint64_t sum = 0;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < count; i += kThreads) sum += square(i);
  add_of_block(space.own, sum);
  const auto key_of = [&](int i) { return sortable(worth[i]); };
  compact_keys(count, key_of, select, [&](int index, int i, int) {
    shared.keys[index] = key_of(i);
    shared.squares[index] = square(i);
  });
  __syncthreads();
  if (threadIdx.x == 0) shared.totals[cluster.rank] = space.own;
  cluster.sync();
  uint64_t total = 0;
#pragma unroll 1
  for (int block = 0; block < cluster.size; ++block) {
    total += __ldcg(reinterpret_cast<const unsigned long long*>(shared.totals) + block);
  }
  const uint64_t wanted = total > own.may_stay ? total - own.may_stay : 0;
  const Spent spent = spend({shared.keys, shared.squares, select.cut}, own, wanted, space);
  __syncthreads();
  if (threadIdx.x == 0) {
    select.cut = spent.cut;
    left = {own, spent.mass, total - spent.squares};
  }
  __syncthreads();
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
 * Cuts the best rows, as `select` has them, to the call's budget. All blocks of the cluster; ends
 * with a barrier.
 * @param first  number of the block's first candidate
 * @param worth  (count) as Weighing::weigh left them
 * @param left   gets what the error is made of
 * @param top_k  where blocks were counting keys, which they are past
 */
template <typename Element, int kWords>
__device__ __forceinline__ void cut_to_budget(const HeadBlock<Element, kWords>& block,
                                              const device::Cluster& cluster, const Tail& tail,
                                              int first, int count, const float* worth,
                                              device::ErrorLeft& left, device::CompactSpace& select,
                                              device::TopKSpace& top_k) {
  const HeadScratch& scratch = block.context.scratch;
  device::cut_to_error(masses_of(block, 0), cluster, asked_of(block, tail), worth,
                       estimates_of(block, first), count,
                       {scratch.best, scratch.best_squares, scratch.totals}, left, select,
                       reinterpret_cast<device::BudgetSpace&>(top_k.rows));
}

}  // namespace pariskv::cuda
