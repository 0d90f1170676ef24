// Statistics of the keys that enter a zone, or leave it: whole numbers, so order cannot matter.
//
// For every dimension, the sum of norms over the keys whose sign is positive. That is a product of
// matrices on the integer tensor cores: signs, 0 or 1, times the norms' digits to the base 256.
// Four subspaces of a key lie in one word, so a column takes one of the four: a digit in its place,
// zeros in the others'.
#include <algorithm>
#include <type_traits>

#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "dispatch.h"
#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kTile = 32;           // keys of a product
constexpr int kWarps = 4;           // of a block
constexpr int kStages = 4;          // tiles of a warp that are on their way
constexpr int kMostTiles = 1024;    // of a warp: its products stay under 2^31
constexpr int kCountingWarps = 16;  // of a block that counts centroids
constexpr int kCountingBlocks = 2;  // of a multiprocessor
constexpr int kLeastCounting = 32;  // tiles of such a block: its table costs as much

template <int kSubspaces>
constexpr int kBlocks = kSubspaces < 32   ? 6
                        : kSubspaces < 64 ? 4
                                          : 2;  // of a multiprocessor: registers allow no more

struct TallyParameters {
  const SequenceView* sequence;
  KeyStatistics statistics;
  int32_t begin, end;
  int32_t segment_tokens;
  int32_t kv_heads;
  int32_t rotated_dim;
  int32_t direction;
  int32_t run;  // tiles that a warp takes, or a block that counts
};

/** Where the keys of tiles of 32 positions lie; a tile never crosses a segment's border. */
struct Keys {
  const TallyParameters& p;
  int subspaces, head, segment, slot;

  __device__ __forceinline__ Keys(const TallyParameters& parameters, int key_subspaces, int kv_head,
                                  int tile)
      : p(parameters),
        subspaces(key_subspaces),
        head(kv_head),
        segment(tile * kTile / p.segment_tokens) {
    slot = tile * kTile - segment * p.segment_tokens;
  }
  __device__ __forceinline__ void advance(int tiles) {
    for (slot += tiles * kTile; slot >= p.segment_tokens; slot -= p.segment_tokens) ++segment;
  }
  __device__ __forceinline__ const uint8_t* signs() const {
    const SummaryLayout layout{p.kv_heads, p.segment_tokens, kSubspaceDim * subspaces, 0};
    return p.sequence->summaries[segment] + layout.signs_at(head, slot);
  }
  __device__ __forceinline__ const uint8_t* norms() const {
    const SummaryLayout layout{p.kv_heads, p.segment_tokens, kSubspaceDim * subspaces, 0};
    return p.sequence->summaries[segment] + layout.norms_at(head, slot);
  }
};

__device__ __forceinline__ bool present(const TallyParameters& p, int position) {
  return uint32_t(position - p.begin) < uint32_t(p.end - p.begin);
}

/** Tiles of a warp on their way through shared memory. */
template <int kSubspaces>
struct alignas(16) Stage {
  uint8_t signs[kTile * kSubspaces];
  uint8_t norms[kTile];

  __device__ __forceinline__ void fetch(const Keys& keys) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int i = lane * 16; i < kTile * kSubspaces; i += 32 * 16) {
      ptx::cp_async_cg_16(shared_address(signs + i), keys.signs() + i);
    }
    if (lane < kTile / 16) {
      ptx::cp_async_cg_16(shared_address(norms + lane * 16), keys.norms() + lane * 16);
    }
  }
};

template <int kSubspaces>
struct Sums {
  uint32_t digits[3][kSubspaces * 8];
  uint32_t usable;
  unsigned long long all, squares;
};

__device__ __forceinline__ void add(int64_t* to, int64_t value) {
  if (value == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

/** One block: some tiles of one head. */
template <int kSubspaces>
__global__ void __launch_bounds__(32 * kWarps, kBlocks<kSubspaces>) tally_tiles(TallyParameters p) {
  constexpr int kWords = kSubspaces / 4;  // of a key's signs
  __shared__ Sums<kSubspaces> sums;
  __shared__ Stage<kSubspaces> stages[kWarps][kStages];
  uint32_t* words = reinterpret_cast<uint32_t*>(&sums);
  for (int i = threadIdx.x; i < int(sizeof sums / 4); i += 32 * kWarps) words[i] = 0;
  __syncthreads();

  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, head = int(blockIdx.y);
  // How the tensor cores see a lane: row of signs or column of digits, and which keys.
  const int row = lane / 4, quarter = lane % 4;
  const uint32_t bit = 0x01010101u << row;
  // Columns 0 to 2: the digits at the first of two subspaces, 3 to 5: at the second one.
  uint32_t place[2];  // how a key's digit gets there: byte 4 is zero
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int shift = (2 * i + row / 3) * 4;
    place[i] = row < 6 ? (0x4444u & ~(15u << shift)) | uint32_t(row % 3) << shift : 0x4444u;
  }
  int32_t products[kWords / 2][2][4] = {};  // two words of signs, the second in rows 8 to 15
  uint32_t usable = 0;
  uint64_t all = 0, squares = 0;
  const int first = p.begin / kTile + (int(blockIdx.x) * kWarps + warp) * p.run;
  const int end = min((p.end - 1) / kTile + 1, first + p.run);
  Keys ahead(p, kSubspaces, head, first);
  const auto fetch = [&](int tile) {
    if (tile < end) stages[warp][tile % kStages].fetch(ahead);
    ahead.advance(1);
    ptx::cp_async_commit_group();
  };
  for (int i = 0; i < kStages - 1; ++i) fetch(first + i);
  for (int tile = first; tile < end; ++tile) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncwarp();
    fetch(tile + kStages - 1);
    const Stage<kSubspaces>& keys = stages[warp][tile % kStages];
    const uint32_t units =
        present(p, tile * kTile + lane) ? uint32_t(norm_units(keys.norms[lane])) : 0;
    all += units;
    squares += uint64_t(units) * units;
    usable += units != 0;
#pragma unroll
    for (int eight = 0; eight < kTile; eight += 8) {
      uint32_t digits[2][2];
      alignas(16) uint32_t signs[2][kWords];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = eight + 4 * half + quarter;
        const uint32_t own = __shfl_sync(kAllLanes, units, key);
#pragma unroll
        for (int i = 0; i < 2; ++i) digits[i][half] = __byte_perm(own, 0, place[i]);
        using Load = std::conditional_t<kSubspaces == 8, uint2, uint4>;
        const auto* from = reinterpret_cast<const Load*>(keys.signs + key * kSubspaces);
#pragma unroll
        for (int w = 0; w < kSubspaces / int(sizeof(Load)); ++w) {
          reinterpret_cast<Load*>(signs[half])[w] = from[w];
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint32_t a[4] = {signs[0][w] & bit, signs[0][w + 1] & bit, signs[1][w] & bit,
                               signs[1][w + 1] & bit};
        ptx::mma_m16n8k32_u8(products[w / 2][0], a, digits[0]);
        ptx::mma_m16n8k32_u8(products[w / 2][1], a, digits[1]);
      }
    }
  }

  // Lane `quarter` holds columns 2 quarter and 2 quarter + 1 of rows `row` and `row` + 8. A
  // word had one bit of each byte, so sums are as many times too large as that is worth.
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * quarter + i % 2, subspace = 4 * w + i / 2 * 2 + column / 3;
      const uint32_t product = uint32_t(products[w / 2][i / 2][w % 2 * 2 + i % 2]);
      if (column < 6) atomicAdd(&sums.digits[column % 3][8 * subspace + row], product >> row);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(kAllLanes, squares, step);
    all += __shfl_xor_sync(kAllLanes, all, step);
  }
  usable = __reduce_add_sync(kAllLanes, usable);
  if (lane == 0) {
    atomicAdd(&sums.all, static_cast<unsigned long long>(all));
    atomicAdd(&sums.usable, usable);
    atomicAdd(&sums.squares, static_cast<unsigned long long>(squares));
  }
  __syncthreads();

  for (int d = threadIdx.x; d < kSubspaces * 8; d += 32 * kWarps) {
    const int64_t positive = int64_t(sums.digits[0][d]) + (int64_t(sums.digits[1][d]) << 8) +
                             (int64_t(sums.digits[2][d]) << 16);
    add(p.statistics.sums + head * kSubspaces * 8 + d,
        p.direction * (2 * positive - int64_t(sums.all)));
  }
  if (threadIdx.x == 0) add(p.statistics.usable + head, p.direction * int64_t(sums.usable));
  if (threadIdx.x == 1) add(p.statistics.square_units + head, p.direction * int64_t(sums.squares));
}

/** One block: centroids of some tiles of one head, in half of its subspaces or all. */
template <int kSubspaces>
__global__ void __launch_bounds__(32 * kCountingWarps, kCountingBlocks)
    count_tiles(TallyParameters p) {
  constexpr int kCounted = kSubspaces < 16 ? kSubspaces : 16;  // 16 KB of counts
  __shared__ int32_t counts[kCounted * 256];
  for (int i = threadIdx.x; i < kCounted * 256; i += 32 * kCountingWarps) counts[i] = 0;
  __syncthreads();

  using Signs = std::conditional_t<kCounted == 8, uint2, uint4>;
  const int head = int(blockIdx.y), subspace = int(blockIdx.z) * kCounted;
  const int key = int(threadIdx.x) % 32;
  const int first = p.begin / kTile + int(blockIdx.x) * p.run;
  const int end = min((p.end - 1) / kTile + 1, first + p.run);
  int tile = first + int(threadIdx.x) / 32;
  Keys keys(p, kSubspaces, head, tile);
  const auto read = [&](int tile, Signs& signs) {
    if (tile >= end || !present(p, tile * kTile + key)) return false;
    signs = *reinterpret_cast<const Signs*>(keys.signs() + key * kSubspaces + subspace);
    return keys.norms()[key] != 0;
  };
  Signs next;
  bool counted = read(tile, next);
  while (tile < end) {
    const Signs signs = next;
    const bool usable = counted;
    tile += kCountingWarps;
    keys.advance(kCountingWarps);
    counted = read(tile, next);
    if (!usable) continue;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&signs);
#pragma unroll
    for (int b = 0; b < kCounted; ++b) {
      atomicAdd(&counts[b * 256 + (words[b / 4] >> (8 * (b % 4)) & 255)], 1);
    }
  }
  __syncthreads();
  int32_t* out = p.statistics.counts + (int64_t(head) * kSubspaces + subspace) * 256;
  for (int i = threadIdx.x; i < kCounted * 256; i += 32 * kCountingWarps) {
    if (counts[i] != 0) atomicAdd(out + i, p.direction * counts[i]);
  }
}

/** Counts where keys are told from the means of blocks: a block, some keys of a head. */
constexpr int kKeysOfThread = 16;
__global__ void __launch_bounds__(32 * kWarps) tally_norms(TallyParameters p) {
  __shared__ unsigned long long sums[2];
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  const int head = int(blockIdx.y);
  uint32_t usable = 0;
  uint64_t squares = 0;
  const int first = p.begin + int(blockIdx.x) * 32 * kWarps * kKeysOfThread + int(threadIdx.x);
  for (int i = 0; i < kKeysOfThread; ++i) {
    const int position = first + 32 * kWarps * i;
    if (position >= p.end) break;
    const int segment = position / p.segment_tokens;
    const SummaryLayout layout{p.kv_heads, p.segment_tokens, p.rotated_dim, 0};
    const int64_t at = layout.norms_at(head, position - segment * p.segment_tokens);
    const uint32_t units = uint32_t(norm_units(p.sequence->summaries[segment][at]));
    usable += units != 0;
    squares += uint64_t(units) * units;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(kAllLanes, squares, step);
  usable = __reduce_add_sync(kAllLanes, usable);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums[0], static_cast<unsigned long long>(usable));
    atomicAdd(&sums[1], static_cast<unsigned long long>(squares));
  }
  __syncthreads();
  if (threadIdx.x == 0) add(p.statistics.usable + head, p.direction * int64_t(sums[0]));
  if (threadIdx.x == 1) add(p.statistics.square_units + head, p.direction * int64_t(sums[1]));
}

template <int kSubspaces>
void launch(TallyParameters& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "tally");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "tally");
  const int tiles = (p.end - 1) / kTile - p.begin / kTile + 1;
  const auto parts = [&](int part) { return (tiles + part - 1) / part; };

  const int warps = std::max(1, processors * kBlocks<kSubspaces> / p.kv_heads) * kWarps;
  p.run = std::min(parts(warps), kMostTiles);
  const dim3 grid(unsigned(parts(p.run * kWarps)), unsigned(p.kv_heads));
  tally_tiles<kSubspaces><<<grid, 32 * kWarps, 0, stream>>>(p);
  check_launch("tally");
  if (p.statistics.counts == nullptr) return;

  if constexpr (kSubspaces * kSubspaceDim <= kMaxVoteDim) {
    constexpr int kPasses = kSubspaces > 16 ? 2 : 1;
    p.run = std::max(parts(std::max(1, processors * kCountingBlocks / (p.kv_heads * kPasses))),
                     kLeastCounting);
    const dim3 counting(unsigned(parts(p.run)), unsigned(p.kv_heads), kPasses);
    count_tiles<kSubspaces><<<counting, 32 * kCountingWarps, 0, stream>>>(p);
    check_launch("tally");
  }
}

}  // namespace

void launch_tally(const EncodeCall& call, int64_t direction, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const SummaryLayout& layout = call.codec.layout;
  TallyParameters p{call.sequence,
                    call.statistics,
                    int32_t(call.begin),
                    int32_t(call.end),
                    int32_t(layout.tokens),
                    int32_t(layout.kv_heads),
                    int32_t(layout.rotated_dim),
                    int32_t(direction),
                    0};
  if (layout.block > 0) {
    constexpr int64_t kKeys = 32 * kWarps * kKeysOfThread;
    const dim3 grid(unsigned((call.end - call.begin + kKeys - 1) / kKeys), unsigned(p.kv_heads));
    tally_norms<<<grid, 32 * kWarps, 0, stream>>>(p);
    check_launch("tally");
    return;
  }
  dispatch(RotatedDims{}, layout.rotated_dim,
           [&](auto dim) { launch<int(decltype(dim)::kValue / kSubspaceDim)>(p, stream); });
}

}  // namespace pariskv::cuda
