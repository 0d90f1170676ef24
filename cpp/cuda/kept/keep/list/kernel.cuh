/**
 * list_rows: which rows a head chooses from, the reference that their keys are told from, and which
 * queries are finite, by the first block of each head. Other blocks pack queries.
 */
#pragma once

#include "device/signal.cuh"
#include "device/warp.cuh"
#include "kept/keep/item.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda {

constexpr int kListThreads = 1024;
constexpr int kReferenceKeys = 15;  // evenly spaced: their median is the reference
constexpr int kHeadThreads = 8;     // of a query head
constexpr int kPackBlocks = 8;      // of a head, besides the first one

/** Positions that are merged in shared memory: where more were kept, in device memory. */
constexpr int kMergedAtOnce = kReferenceKeys * int(kMaxHeadDim);

struct ListSpace {
  union {
    alignas(16) float keys[kReferenceKeys][kMaxHeadDim];
    int32_t positions[kMergedAtOnce];
  };
  alignas(16) float rest[kMaxHeadDim];
  alignas(16) uint32_t words[2][kMaxHeadDim / 4];  // of the reference, then of the rest
  uint32_t exponents[2];
  int whole[kReferenceKeys];
};

template <typename Element>
struct ListRows {
  const ChoiceItem& item;
  ListSpace& space;

  __device__ __forceinline__ int dim() const { return int(item.call.shape.rows.key_dim); }

  /** Attended and held rows in one order. Returns how many they are. */
  __device__ __forceinline__ int merge() const {
    if (item.job.before == nullptr) return 0;
    const device::KeptHead before = item.before();
    const int attended = before.counts()[0], held = before.counts()[1];
    const int32_t* positions = before.positions();
    if (attended + held > kMergedAtOnce) {
      merge(positions, attended, held);
    } else {
      for (int i = int(threadIdx.x); i < attended + held; i += kListThreads) {
        space.positions[i] = positions[i];
      }
      __syncthreads();
      merge(space.positions, attended, held);
    }
    return attended + held;
  }
  __device__ __forceinline__ void merge(const int32_t* positions, int attended, int held) const {
    for (int i = int(threadIdx.x); i < attended + held; i += kListThreads) {
      const bool is_held = i >= attended;
      const int others = is_held ? smaller_than(positions, attended, positions[i])
                                 : smaller_than(positions + attended, held, positions[i]);
      item.sources()[(is_held ? i - attended : i) + others] = i;
    }
  }

  /** The median of some keys, channel by channel, to `rest`. `row(i)` is where one of them lies. */
  template <typename RowAt>
  __device__ __forceinline__ void set_reference(int count, RowAt row) const {
    for (int s = device::warp_id(); s < kReferenceKeys; s += kListThreads / 32) {
      bool whole = count > 0;
      if (count > 0) {
        const auto* key = reinterpret_cast<const Element*>(row(s * count / kReferenceKeys));
        for (int d = device::lane_id(); d < dim(); d += 32) {
          const float x = device::to_float(key[d]);
          space.keys[s][d] = x;
          whole = whole && device::finite(x);
        }
      }
      whole = __all_sync(~0u, whole);
      if (device::lane_id() == 0) space.whole[s] = whole;
    }
    __syncthreads();
    int found = 0;
    for (int s = 0; s < kReferenceKeys; ++s) found += space.whole[s];
    // A thread: a channel of a key, and whether that is the median.
    for (int i = int(threadIdx.x); i < kReferenceKeys * dim(); i += kListThreads) {
      const int s = i / dim(), d = i - s * dim();
      const float x = space.keys[s][d];
      int rank = 0;
#pragma unroll
      for (int o = 0; o < kReferenceKeys; ++o) {
        const float other = space.keys[o][d];
        rank += space.whole[o] != 0 && (other < x || (other == x && o < s));
      }
      const bool median = space.whole[s] != 0 && rank == found / 2;
      if (median || (found == 0 && s == 0)) {
        space.rest[d] = item.reference()[d] = median ? x : 0.0f;
      }
    }
    __syncthreads();
  }

  /** The reference in 8 bits, and the rest in 8 more. */
  __device__ __forceinline__ void round_reference() const {
    for (int part = 0; part < 2; ++part) {
      uint32_t largest = 0;
      for (int d = device::lane_id(); d < dim(); d += 32) {
        largest = max(largest, device::bits_of(space.rest[d]) & 0x7fffffffu);
      }
      const uint32_t exponent = device::exponent_of(__reduce_max_sync(~0u, largest));
      const float up = device::steps_up(exponent), step = device::step_of(exponent);
      __syncthreads();  // all warps have looked at it
      for (int w = int(threadIdx.x); w < dim() / 4; w += kListThreads) {
        float x[4];
        for (int i = 0; i < 4; ++i) x[i] = space.rest[4 * w + i];
        space.words[part][w] = device::rounded_word(x, exponent, up);
        for (int i = 0; i < 4; ++i) {
          space.rest[4 * w + i] = x[i] - device::clamped(rintf(x[i] / step), kByteLevels) * step;
        }
      }
      if (threadIdx.x == 0) space.exponents[part] = exponent;
      __syncthreads();
    }
  }

  /**
   * A head of the query of a position: its causal limit, and its logit of the reference. By
   * kHeadThreads neighbouring lanes.
   */
  __device__ __forceinline__ QueryHead look_up(int64_t position, int query_head) const {
    const device::RecentQueryPlace place = device::recent_place(
        item.call.shape.recent_queries(), const_cast<char*>(item.job.recent), position, query_head);
    const int64_t mark = *place.position;
    const RecentScale scale = *place.scale;
    int dots[2] = {};
    for (int w = 4 * (device::lane_id() % kHeadThreads); w < dim() / 4; w += 4 * kHeadThreads) {
      const uint4 four = *reinterpret_cast<const uint4*>(place.numbers + 4 * w);
      const uint32_t numbers[4] = {four.x, four.y, four.z, four.w};
      for (int part = 0; part < 2; ++part) {
        for (int i = 0; i < 4; ++i) {
          dots[part] = __dp4a(int(numbers[i]), int(space.words[part][w + i]), dots[part]);
        }
      }
    }
    const bool counts = mark == position + 1 && scale.unit == scale.unit;
    const int most = scale.most < int(kMostSteps) ? scale.most : kNoCap;
    QueryHead found{scale.unit, most, 0, counts ? int(mark) : 0};
    for (int part = 0; part < 2; ++part) {
      for (int step = 1; step < kHeadThreads; step *= 2) {
        dots[part] += __shfl_xor_sync(~0u, dots[part], step);
      }
      const float step = device::step_of(space.exponents[part]);
      found.offset += device::part_steps(dots[part], device::finite_steps(scale.unit * step));
    }
    return found;
  }

  /** Queries as products take them (mma_m16n8k32_s8), by one of the blocks for that. */
  __device__ __forceinline__ void pack(int block) const {
    const int group = int(item.call.shape.group), queries = item.positions_asked() * group;
    const int steps = (dim() + 31) / 32, all = int(padded_queries(queries)) / 16 * steps * 32;
    for (int i = block * kListThreads + int(threadIdx.x); i < all;
         i += kPackBlocks * kListThreads) {
      const int lane = i % 32, step = i / 32 % steps, first = i / 32 / steps * 16;
      uint32_t words[2][2] = {};  // the first and the second half of an instruction, two queries
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first + lane / 4 + 8 * half;
        if (query >= queries) continue;
        const auto* numbers = reinterpret_cast<const uint32_t*>(
            device::recent_place(
                item.call.shape.recent_queries(), const_cast<char*>(item.job.recent),
                item.job.asked.begin + query / group, item.head * group + query % group)
                .numbers);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int word = 8 * step + 4 * part + lane % 4;
          if (4 * word < dim()) words[part][half] = numbers[word];
        }
      }
      item.packed()[i] = make_uint4(words[0][0], words[0][1], words[1][0], words[1][1]);
    }
  }

  /** Of rows to choose from, of which so many were kept. */
  template <typename RowAt>
  __device__ __forceinline__ void run(int count, int kept, RowAt row) const {
    set_reference(count, row);
    round_reference();
    const int group = int(item.call.shape.group), queries = item.positions_asked() * group;
    bool has_query = false;
    const int padded = int(padded_queries(queries));
    for (int first = 0; first < padded; first += kListThreads / kHeadThreads) {
      // Lanes without a query do as if they had the last one.
      const int own = first + int(threadIdx.x) / kHeadThreads, q = min(own, queries - 1);
      QueryHead of_query = look_up(item.job.asked.begin + q / group, item.head * group + q % group);
      if (own >= queries) of_query = {};
      if (own < padded && int(threadIdx.x) % kHeadThreads == 0) item.query_heads()[own] = of_query;
      has_query = has_query || of_query.visible_end != 0;
    }
    const bool any = __syncthreads_or(has_query);
    if (threadIdx.x == 0) *item.numbers() = {count, kept, any};
  }
};

template <typename Element>
__global__ void __launch_bounds__(kListThreads)
    list_rows(const __grid_constant__ ChoiceParams params) {
  __shared__ ListSpace space;
  device::let_successor_start();
  const ChoiceItem item(params, int(blockIdx.x));
  const ListRows<Element> list{item, space};
  if (blockIdx.y > 0) return list.pack(int(blockIdx.y) - 1);
  const int kept = list.merge();
  __syncthreads();  // sources are written
  list.run(kept + int(item.job.zone_end - item.job.added), kept,
           [&](int row) { return item.row(row, kept); });
}

}  // namespace pariskv::cuda
