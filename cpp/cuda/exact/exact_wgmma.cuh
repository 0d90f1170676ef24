/**
 * Exact attention in 16 bits on the tensor cores of compute capability 9.0. Two warpgroups own 64
 * queries each; a third brings the tiles of rows that both read.
 *
 * A warpgroup multiplies ahead: the products of its queries with the next keys and those of its
 * weights with the values are under way at once, and the next weights are made during the latter.
 * What rounding takes from the weights is always added: a product that depends on a condition would
 * be waited for.
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

template <typename Element, int kDim>
__global__ void __launch_bounds__(kWgmmaThreads, 1) attend_exact_wgmma(ExactParameters p) {
  using State = WgmmaState<Element, kDim>;
  using Memory = WgmmaMemory<kDim>;
  constexpr int kRows = kWgmmaRows, kStages = Memory::kStages;
  extern __shared__ uint4 staged[];
  __shared__ uint64_t filled[kStages];
  __shared__ uint64_t emptied[kStages];
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
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&filled[i], kWgmmaProducers);
      ptx::mbarrier_init(&emptied[i], kWgmmaConsumers / 32);
    }
  }
  __syncthreads();
  if (group == kWgmmaGroups) {
    ptx::setmaxnreg_dec<56>();
    bring_tiles<Element, kDim>(p, head, rows, tiles, filled, emptied);
    return;
  }
  ptx::setmaxnreg_inc<224>();

  const int row = int(threadIdx.x) % 32 / 4;
  const auto index_of = [&](int own) { return block + warp * 16 + own * 8 + row; };
  const auto limit_of = [&](int own) { return ExactQuery(p, head, index_of(own)).limit; };
  const int seen_by_all = int(p.total - p.tokens + block / p.group + 1);
  const bool capping = p.softcap > 0 || !(p.scale > 0);
  const float unit = capping ? kLog2E<Element> : p.scale * kLog2E<Element>;

  State state;
  state.template start<false>(p, head, index_of);
  uint32_t weights[State::kSteps][4], rest[State::kSteps][4];
  bool strange = false;
  const auto hides = [&](int first) { return first + kRows > seen_by_all; };  // rows from queries
  const auto start_score = [&](typename State::Products& s, const auto& turn) {
    wait(&filled[turn.stage], turn.parity);
    ptx::wgmma_fence();
    state.score(s, Factor(tiles + turn.stage * Memory::kTile, 0));
    ptx::wgmma_commit_group();
  };
  const auto values_of = [&](int stage) { return tiles + stage * Memory::kTile + Memory::kKeys; };
  const auto start_add = [&](int stage) {
    const Factor values(values_of(stage), kRows * 128);
    ptx::wgmma_fence();
    state.add(weights, values);
    state.add(rest, values);
    ptx::wgmma_commit_group();
  };
  // Products of a tile to weights, while the values of the one before are added.
  const auto weigh = [&](typename State::Products& s, int stage, int first) {
    if (capping) state.cap(s, p.scale, p.softcap);
    if (hides(first)) state.hide(s, first, limit_of);
    float rescale[State::kOwn];
    state.weigh(s, unit, rescale);
    ptx::wgmma_wait_group<0>();
    ptx::pin(state.weighted[0]);
    if (!__all_sync(0xffffffffu, rescale[0] == 1 && rescale[1] == 1)) state.rescale_sums(rescale);
    if (hides(first)) strange |= drop_strange<Element, kDim>(memory + values_of(stage));
#pragma unroll
    for (int i = 0; i < 4 * State::kSteps; ++i) {
      const float* pair = &s[0][i / 4 * 2 + i % 4 / 2][2 * (i % 2)];
      weights[i / 4][i % 4] = pack<Element>(pair[0], pair[1], rest[i / 4][i % 4]);
    }
  };

  if (!rows.empty()) {
    Turn<kStages> turn;
    {
      typename State::Products s;
      start_score(s, turn);
      ptx::wgmma_wait_group<0>();
      ptx::pin(s[0]);
      weigh(s, turn.stage, rows.first);
    }
    for (int first = rows.next(p, rows.first, kRows); first < rows.end;
         first = rows.next(p, first, kRows)) {
      const int before = turn.stage;
      turn.next();
      typename State::Products s;
      start_score(s, turn);
      start_add(before);
      ptx::wgmma_wait_group<1>();
      ptx::pin(s[0]);
      weigh(s, turn.stage, first);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&emptied[before]);
    }
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
