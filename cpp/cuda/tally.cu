// Statistics of the keys that enter a zone, or leave it: whole numbers, so order cannot matter.
//
// For every dimension, the sum of norms over the keys whose sign is positive. That is a product of
// matrices: signs, 0 or 1, times the norms' digits to the base 256, on the integer tensor cores.
#include <type_traits>

#include "device/numbers.cuh"
#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kTile = 32;             // keys of a product
constexpr int kWarps = 4;             // of a block
constexpr int kTilesPerWarp = 8;      // a block's sums of them stay under 2^32
constexpr int kCountingTiles = 1024;  // of a block that counts centroids: its table costs as much

struct TallyParameters {
  const SequenceView* sequence;
  KeyStatistics statistics;
  int32_t begin, end;
  int32_t segment_tokens;
  int32_t kv_heads;
  int32_t direction;
};

/**
 * Sixteen rows of signs, 32 keys, eight columns of digits: sums += a b. Both hold 4 keys to a
 * word; a word of a has one bit of each byte, so sums are as many times too large as it is worth.
 */
__device__ __forceinline__ void multiply(int32_t (&sums)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/** Byte `b` of four words, side by side. */
__device__ __forceinline__ uint32_t gather(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3,
                                           int b) {
  const uint32_t pick = uint32_t(b | (b + 4) << 4);
  return __byte_perm(__byte_perm(w0, w1, pick), __byte_perm(w2, w3, pick), 0x5410);
}

/** Where the keys of a tile of 32 positions lie; a tile never crosses a segment's border. */
template <int kSubspaces>
struct Keys {
  const uint8_t* signs;
  const uint8_t* norms;
  uint32_t present;

  __device__ __forceinline__ Keys(const TallyParameters& p, int head, int tile) {
    const int first = tile * kTile;
    const int segment = first / p.segment_tokens, slot = first - segment * p.segment_tokens;
    const uint8_t* block = p.sequence->summaries[segment];
    const BlockLayout layout{p.kv_heads, p.segment_tokens, kSubspaces};
    signs = block + layout.signs(head, slot);
    norms = block + layout.norms(head, slot);
    const int before = max(p.begin - first, 0), behind = max(first + kTile - p.end, 0);
    present = (kAllLanes << before) & (kAllLanes >> behind);
  }
  /** Of key `i`; 0 also where no key is asked for. */
  __device__ __forceinline__ uint32_t units(int i) const {
    return present >> i & 1 ? uint32_t(norm_units(norms[i])) : 0;
  }
};

template <int kSubspaces>
struct Sums {
  uint32_t digits[3][kSubspaces * 8];
  uint32_t all, usable;
  unsigned long long squares;
};

__device__ __forceinline__ void add(int64_t* to, int64_t value) {
  if (value == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

/** One block: some tiles of one head. */
template <int kSubspaces>
__global__ void __launch_bounds__(32 * kWarps, kSubspaces < 32 ? 4 : 2)
    tally_tiles(TallyParameters p) {
  constexpr int kWords = kSubspaces / 4;  // of a key's signs
  __shared__ Sums<kSubspaces> sums;
  uint32_t* words = reinterpret_cast<uint32_t*>(&sums);
  for (int i = threadIdx.x; i < int(sizeof sums / 4); i += 32 * kWarps) words[i] = 0;
  __syncthreads();

  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, head = int(blockIdx.y);
  // How the tensor cores see a lane: row or column, and which keys.
  const int row = lane / 4, quarter = lane % 4;
  const uint32_t bit = 0x01010101u << row;
  int32_t products[kSubspaces / 2][4] = {};
  uint32_t all = 0, usable = 0;
  uint64_t squares = 0;
  const int last = (p.end - 1) / kTile;
  const int first = p.begin / kTile + (int(blockIdx.x) * kWarps + warp) * kTilesPerWarp;
  for (int tile = first; tile <= min(last, first + kTilesPerWarp - 1); ++tile) {
    const Keys<kSubspaces> keys(p, head, tile);
    const uint32_t units = keys.units(lane);
    all += units;
    squares += uint64_t(units) * units;
    usable += units != 0;

    // The keys of a lane are quarter, quarter + 4, ...; they may come in any order, as long as both
    // factors have the same.
    uint32_t digits[2];
    alignas(16) uint32_t signs[8][kWords];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        four[i] = __shfl_sync(kAllLanes, units, 16 * half + 4 * i + quarter);
      }
      digits[half] = row < 3 ? gather(four[0], four[1], four[2], four[3], row) : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint8_t* key = keys.signs + (4 * i + quarter) * kSubspaces;
      using Load = std::conditional_t<kSubspaces == 8, uint2, uint4>;
#pragma unroll
      for (int w = 0; w < kSubspaces / int(sizeof(Load)); ++w) {
        reinterpret_cast<Load*>(signs[i])[w] = reinterpret_cast<const Load*>(key)[w];
      }
    }
#pragma unroll
    for (int b = 0; b < kSubspaces; b += 2) {  // rows 0 to 7: subspace b, 8 to 15: the next one
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = i / 2 * 4, w = b / 4;
        a[i] =
            gather(signs[k][w], signs[k + 1][w], signs[k + 2][w], signs[k + 3][w], b % 4 + i % 2) &
            bit;
      }
      multiply(products[b / 2], a, digits);
    }
  }

  // Lane `quarter` holds columns 2 quarter and 2 quarter + 1 of rows `row` and `row` + 8.
#pragma unroll
  for (int b = 0; b < kSubspaces; b += 2) {
    if (quarter >= 2) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int digit = 2 * quarter + i % 2;
      if (digit < 3) {
        atomicAdd(&sums.digits[digit][8 * (b + i / 2) + row], uint32_t(products[b / 2][i]) >> row);
      }
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(kAllLanes, squares, step);
  }
  all = __reduce_add_sync(kAllLanes, all);
  usable = __reduce_add_sync(kAllLanes, usable);
  if (lane == 0) {
    atomicAdd(&sums.all, all);
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
__global__ void __launch_bounds__(32 * kWarps) count_tiles(TallyParameters p) {
  constexpr int kCounted = kSubspaces < 16 ? kSubspaces : 16;  // 16 KB of counts
  __shared__ int32_t counts[kCounted * 256];
  for (int i = threadIdx.x; i < kCounted * 256; i += 32 * kWarps) counts[i] = 0;
  __syncthreads();

  const int head = int(blockIdx.y), subspace = int(blockIdx.z) * kCounted;
  const int last = (p.end - 1) / kTile;
  const int first = p.begin / kTile + int(blockIdx.x) * kCountingTiles;
  for (int tile = first + int(threadIdx.x) / 32; tile <= min(last, first + kCountingTiles - 1);
       tile += kWarps) {
    const Keys<kSubspaces> keys(p, head, tile);
    const int key = int(threadIdx.x) % 32;
    if (keys.units(key) == 0) continue;
    const uint8_t* signs = keys.signs + key * kSubspaces + subspace;
#pragma unroll
    for (int w = 0; w < kCounted / 4; ++w) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(signs)[w];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        atomicAdd(&counts[(4 * w + i) * 256 + (word >> (8 * i) & 255)], 1);
      }
    }
  }
  __syncthreads();
  int32_t* out = p.statistics.counts + (int64_t(head) * kSubspaces + subspace) * 256;
  for (int i = threadIdx.x; i < kCounted * 256; i += 32 * kWarps) {
    if (counts[i] != 0) atomicAdd(out + i, p.direction * counts[i]);
  }
}

template <int kSubspaces>
void launch(const TallyParameters& p, cudaStream_t stream) {
  const auto blocks = [&](int tiles) {
    return unsigned((p.end - 1) / kTile - p.begin / kTile + tiles) / unsigned(tiles);
  };
  const unsigned heads = unsigned(p.kv_heads);
  const dim3 grid(blocks(kWarps * kTilesPerWarp), heads);
  tally_tiles<kSubspaces><<<grid, 32 * kWarps, 0, stream>>>(p);
  check_launch("tally");
  if (p.statistics.counts == nullptr) return;
  const dim3 counting(blocks(kCountingTiles), heads, kSubspaces > 16 ? 2 : 1);
  count_tiles<kSubspaces><<<counting, 32 * kWarps, 0, stream>>>(p);
  check_launch("tally");
}

}  // namespace

void launch_tally(const EncodeCall& call, int64_t direction, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const ModelShape& shape = call.shape;
  const TallyParameters p{call.sequence,
                          call.statistics,
                          int32_t(call.begin),
                          int32_t(call.end),
                          int32_t(shape.segment_tokens),
                          int32_t(shape.kv_heads),
                          int32_t(direction)};
  switch (shape.subspaces()) {
    case 8:
      return launch<8>(p, stream);
    case 16:
      return launch<16>(p, stream);
    case 32:
      return launch<32>(p, stream);
  }
}

}  // namespace pariskv::cuda
