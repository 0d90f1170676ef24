/**
 * Keys of some rows in 8 bits, less the reference, and their logits for all queries, from products
 * on tensor cores. A block has 64 rows and a warp sixteen of them.
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

/** Bytes of a key, with zeros up to two whole instructions. */
constexpr int padded_key(int key_dim) { return (key_dim + 63) / 64 * 64; }
/** From key to key in shared memory: an odd number of half lines, so no two in the same banks. */
constexpr int key_pitch(int key_dim) {
  return padded_key(key_dim) % 128 != 0 ? padded_key(key_dim) : padded_key(key_dim) + 64;
}

/** What keys are made from. */
struct KeySources {
  const char* from[kLookRows];  // where keys lie
  alignas(16) float reference[kMaxHeadDim];
};

/** A part of a logit, from a product, and all of it: as logit_steps of octaves.h. */
__device__ __forceinline__ int logit_of(const Voice& voice, int dot, float step) {
  const float unit = device::finite_steps(voice.unit * step);
  const int logit = voice.offset + device::part_steps(dot, unit);
  return voice.most < int(kMostSteps) ? min(max(logit, -voice.most), voice.most) : logit;
}

/** The logits of a query and two columns of eight rows: of two neighbours in each. */
using LaneLogits = int[kRowsOfWarp / 8][2];

template <int kChunks>
struct KeyTile {
  const ChoiceItem& item;
  float* steps;  // (kLookRows) of keys; 0: it is not finite
  char* keys;    // (kLookRows, key_pitch) bytes
  int first, rows;

  __device__ __forceinline__ int dim() const { return int(item.call.shape.rows.key_dim); }
  __device__ __forceinline__ char* key(int row) const { return keys + row * key_pitch(dim()); }
  __device__ __forceinline__ static int warp_begin() { return device::warp_id() * kRowsOfWarp; }
  /** The row of a logit that a lane has. */
  __device__ __forceinline__ static int row_of(int column, int i) {
    return warp_begin() + 8 * column + 2 * (device::lane_id() % 4) + i;
  }

  /** Keys of a warp that are on their way together. */
  static constexpr int kRowsAtOnce = 8 / kChunks;

  /** A lane has four neighbouring channels of every 128. */
  __device__ __forceinline__ static int channel(int chunk) {
    return 128 * chunk + 4 * device::lane_id();
  }

  /** Some keys, rounded, by a warp. */
  template <typename Element>
  __device__ __forceinline__ void round_keys(const KeySources& sources, int begin) const {
    float x[kRowsAtOnce][kChunks][4] = {};
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (begin + r >= rows) continue;
      const auto* from = reinterpret_cast<const Element*>(sources.from[begin + r]);
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
          if (channel(c) < dim()) x[r][c][i] = x[r][c][i] - sources.reference[channel(c) + i];
          largest = max(largest, device::bits_of(x[r][c][i]) & 0x7fffffffu);
        }
      }
      const uint32_t exponent = device::exponent_of(__reduce_max_sync(~0u, largest));
      const float up = device::steps_up(exponent);
      auto* to = reinterpret_cast<uint32_t*>(key(begin + r));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (channel(c) < padded_key(dim())) {
          to[channel(c) / 4] = device::rounded_word(x[r][c], exponent, up);
        }
      }
      if (device::lane_id() != 0) continue;
      const bool usable = begin + r < rows && exponent != 255;
      steps[begin + r] = usable ? device::step_of(exponent) : 0.0f;
    }
  }

  /** A lane's part of sixteen queries: of two of them. */
  struct Queries {
    Voice voices[2];
    int asked[2];
    uint32_t numbers[4 * kChunks][4];
  };

  /** Where queries of this head are remembered: divisions that are made once. */
  struct QueryPlaces {
    const int8_t* numbers;  // of the first head's query in slot 0
    int pitch;              // bytes from slot to slot
    int slots, first_slot;  // of the first position that is asked
    int group, key_dim;
    device::IndexDivisor by_group;

    __device__ __forceinline__ const uint4* operator()(int asked, int of_group) const {
      const int slot = first_slot + asked;
      return reinterpret_cast<const uint4*>(numbers + (slot < slots ? slot : slot - slots) * pitch +
                                            of_group * key_dim);
    }
  };
  __device__ __forceinline__ QueryPlaces query_places() const {
    const RecentLayout layout = item.call.shape.recent_queries();
    const int group = int(item.call.shape.group);
    return {device::slot_place(layout, const_cast<char*>(item.job.recent), 0, item.head * group)
                .numbers,
            int(layout.query_heads * layout.key_dim),
            int(layout.slots),
            int(item.job.asked.begin % layout.slots),
            group,
            dim(),
            device::IndexDivisor::of(group)};
  }

  __device__ __forceinline__ void load(const QueryPlaces& places, int first_query, int queries,
                                       Queries& to) const {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + g + 8 * half, asked = int(places.by_group(query));
      const bool there = query < queries;
      to.asked[half] = asked;
      to.voices[half] = there ? item.voices()[query] : Voice{};
      const uint4* words = places(asked, query - asked * places.group);
#pragma unroll
      for (int k = 0; k < 2 * kChunks; ++k) {
        const int at = 4 * k + t;
        const uint4 four = there && 16 * at < places.key_dim ? words[at] : uint4{};
        to.numbers[2 * k][half] = four.x, to.numbers[2 * k][half + 2] = four.y;
        to.numbers[2 * k + 1][half] = four.z, to.numbers[2 * k + 1][half + 2] = four.w;
      }
    }
  }

  /**
   * Logits of sixteen queries and a warp's rows.
   * @param visit  (query, number of its position, whether it has a say, LaneLogits), by all lanes
   */
  template <typename Visit>
  __device__ __forceinline__ void multiply(int first_query, const Queries& own, Visit visit) const {
    const int g = device::lane_id() / 4, t = device::lane_id() % 4;
    int dots[kRowsOfWarp / 8][4] = {};
    // Two instructions at a time, whose channels are in another order on both sides: 16 bytes of a
    // key and of a query at once.
#pragma unroll
    for (int k = 0; k < 2 * kChunks; ++k) {
      if (64 * k >= dim()) break;
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
        const uint4 four = reinterpret_cast<const uint4*>(key(warp_begin() + 8 * n + g))[4 * k + t];
        const uint32_t lower[2] = {four.x, four.y}, upper[2] = {four.z, four.w};
        device::ptx::mma_m16n8k32_s8(dots[n], own.numbers[2 * k], lower);
        device::ptx::mma_m16n8k32_s8(dots[n], own.numbers[2 * k + 1], upper);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Voice& voice = own.voices[half];
      LaneLogits logits;
#pragma unroll
      for (int n = 0; n < kRowsOfWarp / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          logits[n][i] = logit_of(voice, dots[n][2 * half + i], steps[row_of(n, i)]);
        }
      }
      visit(first_query + g + 8 * half, own.asked[half], voice.counts != 0, logits);
    }
  }

  /** Of queries [begin, end). */
  template <typename Visit>
  __device__ __forceinline__ void each_query(int begin, int end, Visit visit) const {
    // The next queries are on their way while these are multiplied.
    const QueryPlaces places = query_places();
    Queries own;
    load(places, begin, end, own);
#pragma unroll 1
    for (int q = begin; q < end; q += 16) {
      Queries next;
      load(places, q + 16, end, next);
      multiply(q, own, visit);
      own = next;
    }
  }
};

}  // namespace pariskv::cuda
