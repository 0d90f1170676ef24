/**
 * Keys of some rows in 8 bits, less the reference, and their logits for all queries, from products
 * on tensor cores. A block has 64 rows and a warp sixteen of them. Or of pages: their middles are
 * the keys, and their distances are multiplied with the sizes of a query's numbers. There are few
 * of these, so a block has sixteen, and a warp a part of the queries.
 */
#pragma once

#include "device/ptx.cuh"
#include "device/warp.cuh"
#include "kept/keep/item.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kLookThreads = 128;
constexpr int kLookRows = 64;                                 // of a block
constexpr int kRowsOfWarp = kLookRows / (kLookThreads / 32);  // two columns of eight

/** Blocks that an SM has room for at least: so many registers a thread. */
template <int kChunks>
constexpr int kLookBlocks = kChunks == 1 ? 4 : 1;
template <bool kPages>
constexpr int kRowsOfTile = kPages ? kRowsOfWarp : kLookRows;

/** Bytes from key to key in shared memory: whole instructions, and no two in the same banks. */
constexpr int key_pitch(int key_dim) { return (key_dim + 31) / 32 * 32 + 16; }

/** What keys are made from. */
struct KeySources {
  const char* from[kLookRows];  // where keys lie
  alignas(16) float reference[kMaxHeadDim];
};

/** A part of a logit, from a product: as logit_steps of octaves.h. */
__device__ __forceinline__ int logit_part(const QueryHead& query_head, int dot, float step) {
  return device::part_steps(dot, device::finite_steps(query_head.unit * step));
}
/** All of it, from what is added to the reference's. */
__device__ __forceinline__ int logit_of(const QueryHead& query_head, int part) {
  return min(max(query_head.offset + part, -query_head.most), query_head.most);
}

/** Four numbers of 8 bits, -127 to 127, without their signs. */
__device__ __forceinline__ uint32_t sizes_of(uint32_t word) {
  const uint32_t negative = word >> 7 & 0x01010101u;
  return (word ^ negative * 255) + negative;
}

constexpr int kColumns = kRowsOfWarp / 8;
/** The logits of a query and two columns of eight rows: of two neighbours in each. */
using LaneLogits = int[kColumns][2];

/** Some rows as a step of a product has them: from the keys of a tile, in shared memory. */
template <int kChunks>
struct Operands {
  // Where they do not fit into registers they are read anew for each product.
  static constexpr bool kHeld = kChunks == 1;
  uint32_t held[kHeld ? 4 : 1][kColumns][2];
  const char* keys;  // of this lane's first row and word
  int pitch;

  __device__ __forceinline__ void load(const char* from, int dim) {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
    pitch = key_pitch(dim);
    keys = from + g * pitch + 4 * t;
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          held[k][n][0] = 32 * k < dim ? word(k, n, 0) : 0;
          held[k][n][1] = 32 * k < dim ? word(k, n, 1) : 0;
        }
      }
    }
  }
  __device__ __forceinline__ uint32_t word(int k, int n, int half) const {
    return *reinterpret_cast<const uint32_t*>(keys + 8 * n * pitch + 32 * k + 16 * half);
  }
  __device__ __forceinline__ void of(int k, int n, uint32_t (&to)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kHeld) {
        to[half] = held[k][n][half];
      } else {
        to[half] = word(k, n, half);
      }
    }
  }
};

template <int kChunks, bool kPages = false>
struct KeyTile {
  const ChoiceItem& item;
  float* steps;  // (kLookRows) of keys; 0: it is not finite
  char* keys;    // (kLookRows, key_pitch) bytes
  int first, rows;
  float* distance_steps = nullptr;  // the same of distances, of pages
  char* distances = nullptr;

  __device__ __forceinline__ int dim() const { return int(item.call.shape.rows.key_dim); }
  __device__ __forceinline__ char* key(int row) const { return keys + row * key_pitch(dim()); }
  __device__ __forceinline__ char* distance(int row) const {
    return distances + row * key_pitch(dim());
  }
  __device__ __forceinline__ static int warp_begin() {
    return kPages ? 0 : device::warp_id() * kRowsOfWarp;
  }
  /** The row of a logit that a lane has. */
  __device__ __forceinline__ static int row_of(int column, int i) {
    return warp_begin() + 8 * column + 2 * (device::lane_id() % 4) + i;
  }

  static constexpr int kRows = kRowsOfTile<kPages>;

  /** Keys of a warp that are on their way together. */
  static constexpr int kRowsAtOnce = 8 / kChunks;

  /** A lane has four neighbouring channels of every 128. */
  __device__ __forceinline__ static int channel(int chunk) {
    return 128 * chunk + 4 * device::lane_id();
  }

  /** Some rows of numbers, by a warp, to 8 bits. Ends without a barrier. */
  __device__ __forceinline__ void round(float (&x)[kRowsAtOnce][kChunks][4], int begin,
                                        char* keys_to, float* steps_to) const {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      uint32_t largest = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, device::bits_of(x[r][c][i]) & kSize);
      }
      const uint32_t exponent = device::exponent_of(__reduce_max_sync(~0u, largest));
      const float up = device::steps_up(exponent);
      auto* to = reinterpret_cast<uint32_t*>(keys_to + (begin + r) * key_pitch(dim()));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        // Zeros up to a whole instruction.
        if (channel(c) < (dim() + 31) / 32 * 32) {
          to[channel(c) / 4] = device::rounded_word(x[r][c], exponent, up);
        }
      }
      if (device::lane_id() != 0) continue;
      const bool usable = begin + r < rows && exponent != 255;
      steps_to[begin + r] = usable ? device::step_of(exponent) : 0.0f;
    }
  }
  /** The head's reference, by all threads. Ends without a barrier. */
  __device__ __forceinline__ void load_reference(KeySources& sources) const {
    for (int d = int(threadIdx.x); d < dim(); d += kLookThreads) {
      sources.reference[d] = item.reference()[d];
    }
  }
  static constexpr uint32_t kSize = 0x7fffffffu;  // bits of a float without its sign

  /**
   * Some keys, rounded, by a warp.
   * @param copies  keys are copied to there, one beside the other; null: they are not
   */
  template <typename Element>
  __device__ __forceinline__ void round_keys(const KeySources& sources, int begin,
                                             char* copies = nullptr) const {
    using Reader = device::RowReader<Element>;
    using Four = typename Reader::template Raw<4>;
    Four keys_in[kRowsAtOnce][kChunks] = {};
    float x[kRowsAtOnce][kChunks][4] = {};
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (begin + r >= rows) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (channel(c) < dim()) {
          keys_in[r][c] = Reader::template raw<4>(sources.from[begin + r], channel(c));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        keys_in[r][c].to(x[r][c]);
        if (copies == nullptr || begin + r >= rows || channel(c) >= dim()) continue;
        auto* to = reinterpret_cast<Element*>(copies) + r * dim() + channel(c);
        *reinterpret_cast<Four*>(to) = keys_in[r][c];
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (channel(c) >= dim()) continue;
      const float4 less = *reinterpret_cast<const float4*>(sources.reference + channel(c));
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        x[r][c][0] -= less.x, x[r][c][1] -= less.y, x[r][c][2] -= less.z, x[r][c][3] -= less.w;
      }
    }
    round(x, begin, keys, steps);
  }

  /** A warp's rows, as a lane multiplies them. */
  struct LaneRows {
    Operands<kChunks> keys, distances;
    float steps[kColumns][2], distance_steps[kColumns][2];
  };
  __device__ __forceinline__ void load(LaneRows& lane) const {
    lane.keys.load(key(warp_begin()), dim());
    if constexpr (kPages) lane.distances.load(distance(warp_begin()), dim());
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        lane.steps[n][i] = steps[row_of(n, i)];
        if constexpr (kPages) lane.distance_steps[n][i] = distance_steps[row_of(n, i)];
      }
    }
  }

  /** A lane's part of sixteen queries: of two of them. */
  struct Queries {
    QueryHead query_heads[2];
    uint32_t numbers[4 * kChunks][4];
  };

  __device__ __forceinline__ void load(int first_query, Queries& to) const {
    const int instructions = (dim() + 31) / 32;
    const uint4* from = item.packed() + first_query / 16 * instructions * 32 + device::lane_id();
#pragma unroll
    for (int k = 0; k < 4 * kChunks; ++k) {
      const uint4 four = k < instructions ? from[32 * k] : uint4{};
      to.numbers[k][0] = four.x, to.numbers[k][1] = four.y;
      to.numbers[k][2] = four.z, to.numbers[k][3] = four.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to.query_heads[half] = item.query_heads()[first_query + device::lane_id() / 4 + 8 * half];
    }
  }

  /**
   * Logits of sixteen queries and a warp's rows.
   * @param visit  (query, QueryHead, LaneLogits), of all queries
   */
  template <typename Visit>
  __device__ __forceinline__ void multiply(int first_query, const Queries& own,
                                           const LaneRows& lane, Visit visit) const {
    int dots[kColumns][4] = {}, far[kColumns][4] = {};
#pragma unroll
    for (int k = 0; k < 4 * kChunks; ++k) {
      if (32 * k >= dim()) break;
      uint32_t sizes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sizes[i] = kPages ? sizes_of(own.numbers[k][i]) : 0;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        uint32_t b[2];
        lane.keys.of(k, n, b);
        device::ptx::mma_m16n8k32_s8(dots[n], own.numbers[k], b);
        if constexpr (kPages) {
          lane.distances.of(k, n, b);
          device::ptx::mma_m16n8k32_s8(far[n], sizes, b);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryHead& query_head = own.query_heads[half];
      LaneLogits logits;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int part = logit_part(query_head, dots[n][2 * half + i], lane.steps[n][i]);
          if constexpr (kPages) {
            part += logit_part(query_head, far[n][2 * half + i], lane.distance_steps[n][i]);
          }
          logits[n][i] = logit_of(query_head, part);
        }
      }
      visit(first_query + device::lane_id() / 4 + 8 * half, query_head, logits);
    }
  }

  /** Of queries [begin, end), whole sixteens: of all of them, or of the warp's part. */
  template <typename Visit>
  __device__ __forceinline__ void each_query(int begin, int end, const LaneRows& lane,
                                             Visit visit) const {
    // The next queries are on their way while these are multiplied.
    constexpr int kStep = 16 * (kPages ? kLookThreads / 32 : 1);
    constexpr int kTurns = kPages || kChunks > 1 ? 1 : 2;  // two need no moves, but registers
    const int first = begin + (kPages ? 16 * device::warp_id() : 0);
    Queries own;
    load(first < end ? first : begin, own);
#pragma unroll kTurns
    for (int q = first; q < end; q += kStep) {
      Queries next;
      load(q + kStep < end ? q + kStep : begin, next);
      multiply(q, own, lane, visit);
      own = next;
    }
  }
};

}  // namespace pariskv::cuda
