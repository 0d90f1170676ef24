/**
 * A choice of one kv head, with what it needs while rows are looked at (LookScratch). Where a part
 * of the pages is looked at, kernels see pages first, in the place of rows.
 */
#pragma once

#include "kept/keep/keys.cuh"
#include "prkv/blocks.cuh"
#include "prkv/params.h"

namespace pariskv::cuda {

/** Of a head of a query. */
struct Tally {
  uint64_t sum;  // of its weights
  int32_t top;   // its largest logit
};

struct PRKVItem : ChoiceItem {
  const PRKVRules& rules;
  const LookScratch& look;
  char* look_space;
  int wanted;  // the best pages that are looked at; 0: all rows are

  __device__ __forceinline__ PRKVItem(const PRKVChoiceParams& params, int index)
      : ChoiceItem(params.choice, index),
        rules(params.rules),
        look(params.look),
        look_space(params.look_space + index * params.look.bytes),
        wanted(int(params.wanted[params.choice.by_heads(index)])) {}

  __device__ __forceinline__ int queries() const {
    return positions_asked() * int(call.shape.group);
  }
  __device__ __forceinline__ char* key(int row) const {
    return look_space + look.keys + row * packed_bytes(call.shape.rows.key_dim);
  }
  __device__ __forceinline__ float* steps() const {
    return reinterpret_cast<float*>(look_space + look.steps);
  }
  /** Where a listed row's key is kept as it is. */
  __device__ __forceinline__ char* copy(int row) const {
    return look_space + look.copies + row * call.shape.rows.key_bytes();
  }
  __device__ __forceinline__ int32_t* whole() const { return at<int32_t>(call.scratch.whole); }
  __device__ __forceinline__ Tally* tallies() const {
    return reinterpret_cast<Tally*>(look_space + look.tallies);
  }
  /** Of a query head of the group: number of its first finite query, or of its last one. */
  __device__ __forceinline__ int32_t& end(int g, int which) const {
    return reinterpret_cast<int32_t*>(look_space + look.ends)[2 * g + which];
  }
  __device__ __forceinline__ int32_t* compared(int g, int which) const {
    return reinterpret_cast<int32_t*>(look_space + look.logits) +
           (2 * g + which) * call.scratch.width;
  }
  __device__ __forceinline__ int32_t* agreed() const { return at<int32_t>(call.scratch.agreed); }

  /** As ZonePages::of. */
  __device__ __forceinline__ ZonePages pages() const {
    const int size = int(rules.page), first = int(job.added) / size;  // quicker than with 64 bits
    return {first, (int(job.zone_end) - 1) / size + 1 - first};
  }
  __device__ __forceinline__ device::AmendedHead amended() const {
    return {job.after, amended_of(call.shape, job.after_capacity), head};
  }
  /** Digest of a page of the sequence without regard to kept rows. */
  __device__ __forceinline__ device::PageNumbers whole_page(int page) const {
    const int size = int(rules.page), segment = int(by_segment(page * size));
    const PageLayout layout = pages_of(call.shape, size);
    return device::page_numbers(layout, reinterpret_cast<char*>(job.sequence->summaries[segment]),
                                head, page - segment * int(layout.pages));
  }

  /** How many there are to choose from, and from which position on one is seen. */
  template <bool kPages>
  __device__ __forceinline__ int count() const {
    return kPages ? int(pages().count) : numbers()->count;
  }
  template <bool kPages>
  __device__ __forceinline__ int seen_from(int i) const {
    return kPages ? int(pages().first + i) * int(rules.page) : position(i, 0);
  }
};

/** Queries whose tallies a block has in shared memory at a time. */
constexpr int kTalliesAtOnce = 512;
static_assert(kTalliesAtOnce % kQueriesAtOnce == 0);

/** Rows of a block, as all kernels but the first find them: in 8 bits. Or pages. */
struct TileSpace {
  float steps[kLookRows], distance_steps[kLookRows];
  int seen_from[kLookRows];
  // and (kLookRows, key_pitch) bytes of keys, then of distances
};
template <bool kPages>
constexpr int tile_bytes(int key_dim) {
  return int(sizeof(TileSpace)) + (kPages ? 2 : 1) * kRowsOfTile<kPages> * key_pitch(key_dim);
}

template <int kChunks, bool kPages>
__device__ __forceinline__ KeyTile<kChunks, kPages> tile_in(const PRKVItem& item, TileSpace& space,
                                                            int first, int count) {
  constexpr int kRows = kRowsOfTile<kPages>;
  char* keys = reinterpret_cast<char*>(&space + 1);
  char* distances = keys + kRows * key_pitch(int(item.call.shape.rows.key_dim));
  const int rows = min(kRows, count - first);
  return {item, space.steps, keys, first, rows, space.distance_steps, distances};
}

/** Keys of a block from row `from` on in scratch, to shared memory, with their steps. */
template <typename Tile>
__device__ __forceinline__ void load_keys(const Tile& tile, const PRKVItem& item, int from,
                                          char* keys, float* steps) {
  const int vectors = int(packed_bytes(tile.dim())) / 16;
  constexpr int kRows = Tile::kRows;
  for (int i = int(threadIdx.x); i < kRows * vectors; i += kLookThreads) {
    const int row = i / vectors, at = i - row * vectors;
    const bool there = row < tile.rows;
    reinterpret_cast<uint4*>(keys + row * key_pitch(tile.dim()))[at] =
        there ? reinterpret_cast<const uint4*>(item.key(from + row))[at] : uint4{};
  }
  if (int(threadIdx.x) < kRows) {
    const bool there = int(threadIdx.x) < tile.rows;
    steps[threadIdx.x] = there ? item.steps()[from + int(threadIdx.x)] : 0.0f;
  }
}

/** The rows of a block from `first` on, to shared memory. Has a barrier. */
template <int kChunks, bool kPages = false>
__device__ __forceinline__ KeyTile<kChunks, kPages> load_tile(const PRKVItem& item,
                                                              unsigned char* shared, int first,
                                                              int count) {
  auto& space = *reinterpret_cast<TileSpace*>(shared);
  const auto tile = tile_in<kChunks, kPages>(item, space, first, count);
  load_keys(tile, item, first, tile.keys, tile.steps);
  if constexpr (kPages) {
    load_keys(tile, item, count + first, tile.distances, tile.distance_steps);
  }
  const int i = int(threadIdx.x);
  if (i < kRowsOfTile<kPages>) {
    space.seen_from[i] = i < tile.rows ? item.seen_from<kPages>(first + i) : 0;
  }
  __syncthreads();
  return tile;
}

/** Of a lane's rows: from which position on they are seen; never, if they cannot be kept. */
struct VisibleFrom {
  int from[kColumns][2];

  template <typename Tile>
  __device__ __forceinline__ VisibleFrom(const Tile& tile, const int* seen_from) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile.row_of(n, i);
        from[n][i] = tile.steps[row] > 0 ? seen_from[row] : INT32_MAX;
      }
    }
  }
  /** A logit; kNoLogit where the query does not see the row. */
  __device__ __forceinline__ int logit(const QueryHead& query_head, const LaneLogits& logits, int n,
                                       int i) const {
    return from[n][i] < query_head.visible_end ? logits[n][i] : kNoLogit;
  }
};

/** Whether a query sees a row. */
__device__ __forceinline__ bool sees(const QueryHead& query_head, int position, float step) {
  return step > 0 && position < query_head.visible_end;
}

}  // namespace pariskv::cuda
