/**
 * look_at_keys: the logit of every row for the query of every position, in whole steps, the largest
 * of the group. A block has some rows and a warp some of these: it rounds their keys to 8 bits,
 * less the reference, and multiplies them with all queries on tensor cores.
 */
#pragma once

#include "device/ptx.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"
#include "kept/keep/item.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kLookThreads = 128;
constexpr int kLookRows = 64;                                 // of a block
constexpr int kRowsOfWarp = kLookRows / (kLookThreads / 32);  // two columns of eight
constexpr int kAskedAtMost = 32;                              // positions

/** Bytes from key to key in shared memory: whole instructions, and no two in the same banks. */
constexpr int key_pitch(int key_dim) { return (key_dim + 31) / 32 * 32 + 16; }

struct LookSpace {
  int logits[kAskedAtMost][kLookRows];
  const char* from[kLookRows];  // where keys lie
  int positions[kLookRows];
  float steps[kLookRows];  // of keys; 0: it is not finite
  uint8_t usable[kLookRows];
  alignas(16) float reference[kMaxHeadDim];
  // and (kLookRows, key_pitch) bytes of keys
};

template <typename Element, int kChunks>
struct LookAtKeys {
  const ChoiceItem& item;
  LookSpace& space;
  int first, rows, kept;  // the block's rows; ChosenHead's

  __device__ __forceinline__ int dim() const { return int(item.call.shape.rows.key_dim); }
  __device__ __forceinline__ char* key(int row) const {
    return reinterpret_cast<char*>(&space + 1) + row * key_pitch(dim());
  }

  /** Keys of a warp that are on their way together. */
  static constexpr int kRowsAtOnce = 8 / kChunks;

  /** A lane has four neighbouring channels of every 128. */
  __device__ __forceinline__ static int channel(int chunk) {
    return 128 * chunk + 4 * device::lane_id();
  }

  /** Some keys, rounded, by a warp. */
  __device__ __forceinline__ void round_keys(int begin) const {
    float x[kRowsAtOnce][kChunks][4] = {};
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (begin + r >= rows) continue;
      const auto* from = reinterpret_cast<const Element*>(space.from[begin + r]);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (channel(c) >= dim()) continue;
        struct alignas(4 * sizeof(Element)) Four {
          Element of[4];
        };
        const Four four = *reinterpret_cast<const Four*>(from + channel(c));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[r][c][i] = device::to_float(four.of[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      uint32_t largest = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (channel(c) < dim()) x[r][c][i] = x[r][c][i] - space.reference[channel(c) + i];
          largest = max(largest, device::bits_of(x[r][c][i]) & 0x7fffffffu);
        }
      }
      const uint32_t exponent = device::exponent_of(__reduce_max_sync(~0u, largest));
      const float up = device::steps_up(exponent);
      auto* to = reinterpret_cast<uint32_t*>(key(begin + r));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        // Zeros up to a whole instruction.
        if (channel(c) < (dim() + 31) / 32 * 32) {
          to[channel(c) / 4] = device::rounded_word(x[r][c], exponent, up);
        }
      }
      if (device::lane_id() != 0) continue;
      const bool usable = begin + r < rows && exponent != 255;
      space.steps[begin + r] = usable ? device::step_of(exponent) : 0.0f;
      space.usable[begin + r] = usable;
      if (begin + r < rows) item.usable()[first + begin + r] = usable;
    }
  }

  /** A lane's part of sixteen queries: of two of them. */
  struct Queries {
    Voice voices[2];
    uint32_t numbers[4 * kChunks][4];
  };

  __device__ __forceinline__ void load(int first_query, int queries, Queries& to) const {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
    const int group = int(item.call.shape.group);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + g + 8 * half, asked = query / group;
      const bool there = query < queries;
      to.voices[half] = there ? item.voices()[query] : Voice{};
      const auto* words = reinterpret_cast<const uint32_t*>(
          device::recent_place(item.call.shape.recent_queries(), const_cast<char*>(item.job.recent),
                               item.job.asked.begin + asked,
                               item.head * group + query - asked * group)
              .numbers);
#pragma unroll
      for (int k = 0; k < 4 * kChunks; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int word = 8 * k + 4 * i + t;
          to.numbers[k][half + 2 * i] = there && 4 * word < dim() ? words[word] : 0;
        }
      }
    }
  }

  /** Logits of sixteen queries and a warp's rows. */
  __device__ __forceinline__ void multiply(int first_query, const Queries& own) const {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
    const int begin = device::warp_id() * kRowsOfWarp;
    int dots[kRowsOfWarp / 8][4] = {};
#pragma unroll
    for (int k = 0; k < 4 * kChunks; ++k) {
      if (32 * k >= dim()) break;
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
        const auto* words = reinterpret_cast<const uint32_t*>(key(begin + 8 * n + g)) + 8 * k + t;
        const uint32_t b[2] = {words[0], words[4]};
        device::ptx::mma_m16n8k32_s8(dots[n], own.numbers[k], b);
      }
    }
    const int group = int(item.call.shape.group);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Voice& voice = own.voices[half];
      if (voice.counts == 0) continue;
      int* logits = space.logits[(first_query + g + 8 * half) / group];
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = begin + 8 * n + 2 * t + i;
          const float unit = device::finite_steps(voice.unit * space.steps[row]);
          int logit = voice.offset + device::part_steps(dots[n][2 * half + i], unit);
          if (voice.most < int(kMostSteps)) logit = min(max(logit, -voice.most), voice.most);
          atomicMax(&logits[row], logit);
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    for (int i = int(threadIdx.x); i < kAskedAtMost * kLookRows; i += kLookThreads) {
      space.logits[i / kLookRows][i % kLookRows] = kNoLogit;
    }
    for (int d = int(threadIdx.x); d < dim(); d += kLookThreads) {
      space.reference[d] = item.reference()[d];
    }
    if (int(threadIdx.x) < rows) {
      const int row = first + int(threadIdx.x);
      space.from[threadIdx.x] = item.row(row, kept);
      space.positions[threadIdx.x] = item.position(row, kept);
    }
    __syncthreads();
    const int begin = device::warp_id() * kRowsOfWarp;
#pragma unroll 1
    for (int r = 0; r < kRowsOfWarp; r += kRowsAtOnce) round_keys(begin + r);
    __syncwarp();
    const int queries = item.positions_asked() * int(item.call.shape.group);
    // The next queries are on their way while these are multiplied.
    Queries own;
    load(0, queries, own);
#pragma unroll 1
    for (int q = 0; q < queries; q += 16) {
      Queries next;
      load(q + 16, queries, next);
      multiply(q, own);
      own = next;
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < item.positions_asked() * kLookRows; i += kLookThreads) {
      const int asked = i / kLookRows, row = i % kLookRows;
      if (row >= rows) continue;
      const bool seen =
          space.usable[row] != 0 && space.positions[row] <= int(item.job.asked.begin) + asked;
      item.logits(asked)[first + row] = seen ? space.logits[asked][row] : kNoLogit;
    }
  }
};

template <typename Element, int kChunks>
__global__ void __launch_bounds__(kLookThreads)
    look_at_keys(const __grid_constant__ ChoiceParams params) {
  extern __shared__ __align__(16) unsigned char look_shared[];
  device::let_successor_start();
  device::wait_for_predecessor();
  const ChoiceItem item(params, int(blockIdx.y));
  const ChosenHead numbers = *item.numbers();
  const int first = int(blockIdx.x) * kLookRows;
  if (first >= numbers.count) return;
  LookAtKeys<Element, kChunks>{item, *reinterpret_cast<LookSpace*>(look_shared), first,
                               min(kLookRows, numbers.count - first), numbers.kept}
      .run();
}

}  // namespace pariskv::cuda
