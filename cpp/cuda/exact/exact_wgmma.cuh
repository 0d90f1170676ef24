/**
 * Exact attention in 16 bits on the tensor cores of compute capability 9.0. Two warpgroups own 64
 * queries each; a third brings the tiles of rows that both read.
 *
 * A warpgroup multiplies ahead: the products of its queries with the next keys and those of its
 * weights with the values are under way at once, and the next weights are made during the latter.
 * What rounding takes from the weights is added for all of them, or with Precision::kFast for none:
 * a product that depends on a condition would be waited for.
 * Tiles are written by ordinary copies and read by the matrix unit, so a fence stands in between.
 */
#pragma once

#include "device/barrier.cuh"
#include "device/ptx_wgmma.cuh"
#include "exact/running_softmax.cuh"

namespace pariskv::cuda::device {

constexpr int kWgmmaGroups = 2;
constexpr int kWgmmaConsumers = 128 * kWgmmaGroups;
constexpr int kWgmmaProducers = 128;
constexpr int kWgmmaThreads = kWgmmaConsumers + kWgmmaProducers;
constexpr int kWgmmaQueries = 64 * kWgmmaGroups;  // of a block
constexpr int kWgmmaRows = 64;                    // of a tile

/**
 * Shared memory has tiles, each with its keys first. All of them are slabs of 64 dimensions, whose
 * rows of 128 bytes have their 16-byte pieces exchanged as the matrix unit wants them: by the row's
 * place among eight.
 */
template <int kDim>
struct WgmmaMemory {
  static constexpr int kKeys = kWgmmaRows * kDim * 2, kTile = 2 * kKeys;
  static constexpr int kStages = 6;
  static constexpr int kAlignment = 1024;
  static constexpr int kBytes = kStages * kTile + kAlignment;
  // A tile is handed back after the next has come, and handed over after one more is under way.
  static_assert(kStages >= 3);
};

/**
 * What the matrix unit is told of a factor: 8 rows lie side by side, slabs so many bytes apart.
 * Its lower half can be added to: places in units of 16 bytes.
 */
struct Factor {
  uint32_t low;

  __device__ __forceinline__ Factor(uint32_t address, uint32_t slab_bytes)
      : low((address >> 4 & 0x3fff) | (slab_bytes >> 4) << 16) {}
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    constexpr uint64_t kHigh = uint64_t((8 * 128 >> 4) | 1 << 30) << 32;
    return kHigh | (low + (bytes >> 4));
  }
};

/** One of the places for tiles after the other, and the parity of its barriers' phase. */
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ Turn previous() const {
    return stage == 0 ? Turn{kStages - 1, parity ^ 1} : Turn{stage - 1, parity};
  }
};

/** Brings the block's tiles, one after the other. A thread has the same piece of several rows. */
template <typename Element, int kDim>
__device__ __forceinline__ void bring_tiles(const ExactParameters& p, int head,
                                            const ExactRows& rows, uint32_t tiles, uint64_t* filled,
                                            uint64_t* emptied) {
  using Memory = WgmmaMemory<kDim>;
  constexpr int kPieces = 4 * kDim / 16, kStep = kWgmmaProducers / kPieces;
  static_assert(kStep == 4 || kStep == 8);
  const int own = int(threadIdx.x) - kWgmmaConsumers;
  const int piece = own % kPieces, own_row = own / kPieces;
  const uint32_t place = tiles + piece / 8 * (kWgmmaRows * 128) + own_row * 128;
  const uint32_t even = place + (piece ^ own_row) % 8 * 16;
  const uint32_t odd = place + (piece ^ (own_row + kStep)) % 8 * 16;
  Turn<Memory::kStages> turn;
  uint64_t* before = nullptr;
  for (int first = rows.first, tile = 0; first < rows.end;
       first = rows.next(p, first, kWgmmaRows), ++tile) {
    if (tile >= Memory::kStages) wait(&emptied[turn.stage], turn.parity ^ 1);
    const char* from = exact_rows(p, head, first, 4 * kDim) + own * 16;
    const uint32_t to = turn.stage * Memory::kTile;
    const bool whole = first + kWgmmaRows <= rows.end;
#pragma unroll
    for (int i = 0; i < kWgmmaRows / kStep; ++i) {
      const bool there = whole || first + own_row + i * kStep < rows.end;
      ptx::cp_async_cg_16(to + (i % 2 == 0 ? even : odd) + i * (kStep * 128),
                          from + i * (16 * kWgmmaProducers), there);
    }
    ptx::cp_async_commit_group();
    if (before != nullptr) {
      ptx::cp_async_wait_group<1>();
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(before);
    }
    before = &filled[turn.stage];
    turn.next();
  }
  ptx::cp_async_wait_group<0>();
  ptx::fence_proxy_async_shared();
  if (before != nullptr) ptx::mbarrier_arrive(before);
}

/**
 * The same with keys and values apart, each with barriers of its own: keys make room as soon as
 * they are multiplied. Zeros follow, up to a multiple of kTiles. Barrier 2 i is of the keys of
 * place i, the next one of its values.
 */
template <typename Element, int kDim, int kTiles>
__device__ __forceinline__ void bring_halves(const ExactParameters& p, int head,
                                             const ExactRows& rows, uint32_t tiles,
                                             uint64_t* filled, uint64_t* emptied) {
  using Memory = WgmmaMemory<kDim>;
  constexpr int kPieces = 2 * kDim / 16, kStep = kWgmmaProducers / kPieces;
  static_assert(kStep % 8 == 0);  // so that a thread's pieces have one place among eight
  const int own = int(threadIdx.x) - kWgmmaConsumers;
  const int piece = own % kPieces, own_row = own / kPieces;
  const uint32_t place =
      tiles + piece / 8 * (kWgmmaRows * 128) + own_row * 128 + (piece ^ own_row) % 8 * 16;
  Turn<Memory::kStages> turn;
  uint64_t* before = nullptr;
  const auto hand_over = [&] {
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(before);
  };
  for (int first = rows.first, tile = 0; first < rows.end || tile % kTiles != 0;
       first = rows.next(p, first, kWgmmaRows), ++tile) {
    const int at = first < rows.end ? first : rows.first;  // where zeros would come from
    const char* from = exact_rows(p, head, at, 4 * kDim) + own_row * (4 * kDim) + piece * 16;
    const bool whole = first + kWgmmaRows <= rows.end;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int barrier = 2 * turn.stage + half;
      if (tile >= Memory::kStages) {
        // Not before a wait: who empties this place may need what came before.
        if (before != nullptr &&
            !ptx::mbarrier_test_wait_parity(&emptied[barrier], turn.parity ^ 1)) {
          ptx::cp_async_wait_group<0>();
          hand_over();
          before = nullptr;
        }
        wait(&emptied[barrier], turn.parity ^ 1);
      }
      const uint32_t to = place + turn.stage * Memory::kTile + half * Memory::kKeys;
#pragma unroll
      for (int i = 0; i < kWgmmaRows / kStep; ++i) {
        const bool there = whole || first + own_row + i * kStep < rows.end;
        ptx::cp_async_cg_16(to + i * (kStep * 128),
                            from + half * (2 * kDim) + i * (kStep * 4 * kDim), there);
      }
      ptx::cp_async_commit_group();
      if (before != nullptr) {
        ptx::cp_async_wait_group<1>();
        hand_over();
      }
      before = &filled[barrier];
    }
    turn.next();
  }
  ptx::cp_async_wait_group<0>();
  if (before != nullptr) hand_over();
}

/** How a block works, with weights in two terms. */
struct ExactPlan {
  static constexpr bool kFast = false;
  static constexpr bool kTurns = false;  // of the warpgroups at the matrix unit
  static constexpr int kTiles = 1;       // that are weighed together
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
};
/**
 * With weights in one term (Precision::kFast) there are registers for two tiles, and products take
 * less time than weights. So warpgroups take turns: one makes weights while the other multiplies.
 */
template <int kDim>
struct FastPlan {
  static constexpr bool kFast = true, kTurns = true;
  static constexpr int kTiles = 2;
  static constexpr int kProducerRegisters = kDim > 64 ? 40 : 56;
  static constexpr int kConsumerRegisters = kDim > 64 ? 232 : 224;
};

/** The products of a warpgroup's queries: a warp has 16. */
template <typename Element, int kDim>
struct WgmmaState : RunningSoftmax<Element, kDim, kWgmmaRows, 1> {
  using Softmax = RunningSoftmax<Element, kDim, kWgmmaRows, 1>;
  using Memory = WgmmaMemory<kDim>;
  static constexpr int kSteps = kWgmmaRows / 16;  // of 16 rows

  /** Starts the products of the queries with the keys of a tile. */
  __device__ __forceinline__ void score(typename Softmax::Products& s, Factor keys) const {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint64_t b = keys.at(k / 4 * (kWgmmaRows * 128) + k % 4 * 32);
      if constexpr (std::is_same_v<Element, __half>) {
        ptx::wgmma_m64n64k16_f16(s[0], this->query[0][k], b, k > 0);
      } else {
        ptx::wgmma_m64n64k16_bf16(s[0], this->query[0][k], b, k > 0);
      }
    }
  }
  /** Starts to add the values of a tile, weighted. */
  __device__ __forceinline__ void add(const uint32_t (&weights)[kSteps][4], Factor values) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t b = values.at(k * (16 * 128));
      constexpr bool kHalf = std::is_same_v<Element, __half>;
      if constexpr (kDim == 64 && kHalf) {
        ptx::wgmma_m64n64k16_f16_trans(this->weighted[0], weights[k], b);
      } else if constexpr (kDim == 64) {
        ptx::wgmma_m64n64k16_bf16_trans(this->weighted[0], weights[k], b);
      } else if constexpr (kHalf) {
        ptx::wgmma_m64n128k16_f16_trans(this->weighted[0], weights[k], b);
      } else {
        ptx::wgmma_m64n128k16_bf16_trans(this->weighted[0], weights[k], b);
      }
    }
  }
};

/**
 * Takes values that are not finite out of a tile: no weight of 0 hides them. All consumers of the
 * block together. Returns whether there was one.
 */
template <typename Element, int kDim>
__device__ __forceinline__ bool drop_strange(char* values) {
  const auto value = [&](int i) -> Element& {
    return *reinterpret_cast<Element*>(values + 2 * i);  // in whatever order
  };
  bool strange = false;
  for (int i = threadIdx.x; i < kWgmmaRows * kDim; i += kWgmmaConsumers) {
    strange = strange || !finite(to_float(value(i)));
  }
  if (!ptx::barrier_red_or(3, kWgmmaConsumers, strange)) return false;
  for (int i = threadIdx.x; i < kWgmmaRows * kDim; i += kWgmmaConsumers) {
    if (!finite(to_float(value(i)))) value(i) = from_float<Element>(0.0f);
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_red_or(3, kWgmmaConsumers, false);
  return true;
}

template <typename Element, int kDim, typename Plan>
__global__ void __launch_bounds__(kWgmmaThreads, 1) attend_exact_wgmma(ExactParameters p) {
  using State = WgmmaState<Element, kDim>;
  using Memory = WgmmaMemory<kDim>;
  constexpr int kRows = kWgmmaRows, kStages = Memory::kStages, kTiles = Plan::kTiles;
  using Round = typename State::Products[kTiles];
  using Place = Turn<kStages / kTiles>;
  static_assert(kStages % kTiles == 0);
  extern __shared__ uint4 staged[];
  // Of a place for a tile, or of its keys and of its values.
  constexpr int kParts = Plan::kFast ? 2 : 1, kBarriers = kStages * kParts;
  __shared__ uint64_t filled[kBarriers];
  __shared__ uint64_t emptied[kBarriers];
  const uint32_t start = shared_address(staged);
  const uint32_t tiles = (start + Memory::kAlignment - 1) / Memory::kAlignment * Memory::kAlignment;
  char* const memory = reinterpret_cast<char*>(staged) - start;
  // From one lane, so that the compiler knows that a warp has one.
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), group = warp / 4;
  const int head = int(blockIdx.y);
  const int64_t block = exact_first_query(p, kWgmmaQueries);
  const ExactRows rows(p, min(block + kWgmmaQueries, p.tokens * p.group) - 1);
  if (rows.empty() && p.resumes) return;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kBarriers; ++i) {
      ptx::mbarrier_init(&filled[i], kWgmmaProducers);
      ptx::mbarrier_init(&emptied[i], kWgmmaConsumers / 32);
    }
  }
  __syncthreads();
  if (group == kWgmmaGroups) {
    ptx::setmaxnreg_dec<Plan::kProducerRegisters>();
    if constexpr (Plan::kFast) {
      bring_halves<Element, kDim, kTiles>(p, head, rows, tiles, filled, emptied);
    } else {
      bring_tiles<Element, kDim>(p, head, rows, tiles, filled, emptied);
    }
    return;
  }
  ptx::setmaxnreg_inc<Plan::kConsumerRegisters>();

  const auto first_query = uint32_t(block + warp * 16 + threadIdx.x % 32 / 4);
  const auto index_of = [&](int own) { return first_query + uint32_t(own * 8); };
  const auto limit_of = [&](int own) { return ExactQuery(p, head, index_of(own)).limit; };
  int seen_by_all = int(p.total - p.tokens + block / p.group + 1);
  if (kTiles > 1) seen_by_all = min(seen_by_all, rows.end);  // nor are zeros seen
  const bool capping = p.softcap > 0 || !(p.scale > 0);
  const float unit = capping ? kLog2E<Element> : p.scale * kLog2E<Element>;

  State state;
  state.template start<false>(p, head, index_of);
  uint32_t weights[kTiles][State::kSteps][4], rest[kTiles][State::kSteps][4];
  bool strange = false;
  const auto hides = [&](int first) { return first + kRows > seen_by_all; };  // rows from queries
  // Where the tile lies that follows so many after the one at `at`.
  const auto after = [&](int at, int count) {
#pragma unroll
    for (int t = 0; t < count; ++t) at = rows.next(p, at, kRows);
    return at;
  };
  // Of a round: its keys, or with kParts - 1 its values.
  const auto await = [&](const Place& turn, int part) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      wait(&filled[(turn.stage * kTiles + t) * kParts + part], turn.parity);
    }
  };
  const auto hand_back = [&](int round, int part) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      ptx::mbarrier_arrive(&emptied[(round * kTiles + t) * kParts + part]);
    }
  };
  // Barriers 1 and 2 are the turns of the first and the second warpgroup.
  const auto take_turn = [&] {
    group == 0 ? ptx::barrier_sync(1, kWgmmaConsumers) : ptx::barrier_sync(2, kWgmmaConsumers);
  };
  const auto pass_turn = [&](bool goes_on) {
    if (group == 0) return ptx::barrier_arrive(2, kWgmmaConsumers);
    if (goes_on) ptx::barrier_arrive(1, kWgmmaConsumers);
  };
  const auto start_score = [&](Round& s, const Place& turn) {
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      state.score(s[t], Factor(tiles + (turn.stage * kTiles + t) * Memory::kTile, 0));
    }
    ptx::wgmma_commit_group();
  };
  const auto values_of = [&](int stage) { return tiles + stage * Memory::kTile + Memory::kKeys; };
  const auto start_add = [&](int round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const Factor values(values_of(round * kTiles + t), kRows * 128);
      state.add(weights[t], values);
      if constexpr (!Plan::kFast) state.add(rest[t], values);
    }
    ptx::wgmma_commit_group();
  };
  // Products of a round to weights, while the values of the one before are added.
  const auto weigh = [&](Round& s, const Place& turn, int at) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (capping) state.cap(s[t], p.scale, p.softcap);
      if (!hides(after(at, t))) continue;
      state.hide(s[t], after(at, t), [&](int own) {
        return kTiles > 1 ? min(limit_of(own), rows.end) : limit_of(own);
      });
    }
    float rescale[State::kOwn];
    if constexpr (Plan::kFast) {
      state.weigh_fast(s, unit, rescale);
    } else {
      state.weigh(s[0], unit, rescale);
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin(state.weighted[0]);
    if (!__all_sync(0xffffffffu, rescale[0] == 1 && rescale[1] == 1)) state.rescale_sums(rescale);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (!hides(after(at, t))) continue;
      if (Plan::kFast) wait(&filled[(turn.stage * kTiles + t) * kParts + 1], turn.parity);
      strange |= drop_strange<Element, kDim>(memory + values_of(turn.stage * kTiles + t));
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4 * State::kSteps; ++i) {
        const float* pair = &s[t][0][i / 4 * 2 + i % 4 / 2][2 * (i % 2)];
        uint32_t& two = weights[t][i / 4][i % 4];
        if constexpr (Plan::kFast) {
          two = pack<Element>(pair[0], pair[1]);
        } else {
          two = pack<Element>(pair[0], pair[1], rest[t][i / 4][i % 4]);
        }
      }
    }
  };

  if (!rows.empty()) {
    Place turn;
    int at = rows.first;
    {
      Round s;
      await(turn, 0);
      start_score(s, turn);
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) ptx::pin(s[t][0]);
      if (Plan::kFast) hand_back(turn.stage, 0);
      weigh(s, turn, at);
    }
    at = after(at, kTiles);
    if (Plan::kTurns && group == 1) pass_turn(at < rows.end);
    for (; at < rows.end; at = after(at, kTiles)) {
      turn.next();
      Round s;
      await(turn, 0);
      if (Plan::kFast) await(turn.previous(), 1);
      if (Plan::kTurns) take_turn();
      start_score(s, turn);
      start_add(turn.previous().stage);
      if (Plan::kTurns) pass_turn(after(at, kTiles) < rows.end);
      ptx::wgmma_wait_group<1>();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) ptx::pin(s[t][0]);
      if (Plan::kFast) hand_back(turn.stage, 0);
      weigh(s, turn, at);
      hand_back(turn.previous().stage, kParts - 1);
    }
    if (Plan::kFast) await(turn, 1);
    start_add(turn.stage);
    ptx::wgmma_wait_group<0>();
    ptx::pin(state.weighted[0]);
  }
  for (int at = rows.first; strange && at < rows.end; at = rows.next(p, at, kRows)) {
    if (!hides(at)) continue;
    const Element* tile_rows = reinterpret_cast<const Element*>(exact_rows(p, head, at, 4 * kDim));
    state.add_strange([&](int r, int d) { return tile_rows[(2 * r + 1) * kDim + d]; }, at,
                      limit_of);
  }
  state.template finish<false>(p, head, index_of);
}

}  // namespace pariskv::cuda::device
