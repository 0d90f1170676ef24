/** A choice of one kv head, with what it needs while rows are looked at (LookScratch). */
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

/** Bytes of a key in 8 bits. */
constexpr int64_t key_bytes(int64_t key_dim) { return padded_key(int(key_dim)); }

struct PrkvItem : ChoiceItem {
  const PrkvRules& rules;
  const LookScratch& look;
  char* look_space;

  __device__ __forceinline__ PrkvItem(const PrkvChoiceParams& params, int index)
      : ChoiceItem(params.choice, index),
        rules(params.rules),
        look(params.look),
        look_space(params.look_space + index * params.look.bytes) {}

  __device__ __forceinline__ int queries() const {
    return positions_asked() * int(call.shape.group);
  }
  __device__ __forceinline__ char* key(int row) const {
    return look_space + look.keys + row * key_bytes(call.shape.rows.key_dim);
  }
  __device__ __forceinline__ float* steps() const {
    return reinterpret_cast<float*>(look_space + look.steps);
  }
  __device__ __forceinline__ Tally* tallies() const {
    return reinterpret_cast<Tally*>(look_space + look.tallies);
  }
  /** Of a query head of the group: number of its first query that has a say, or its last one's. */
  __device__ __forceinline__ int32_t& end(int g, int which) const {
    return reinterpret_cast<int32_t*>(look_space + look.ends)[2 * g + which];
  }
  __device__ __forceinline__ int32_t* compared(int g, int which) const {
    return reinterpret_cast<int32_t*>(look_space + look.logits) +
           (2 * g + which) * call.scratch.width;
  }
  __device__ __forceinline__ int32_t* agreed() const { return at<int32_t>(call.scratch.agreed); }

  __device__ __forceinline__ device::AmendedHead amended() const {
    return {job.after, amended_of(call.shape, job.after_capacity), head};
  }
};

/** Rows of a block, as all kernels but the first find them: in 8 bits. */
struct TileSpace {
  float steps[kLookRows];
  // and (kLookRows, key_pitch) bytes of keys
};
constexpr int tile_bytes(int key_dim) {
  return int(sizeof(TileSpace)) + kLookRows * key_pitch(key_dim);
}

/** The rows of a block from `first` on, to shared memory. Has a barrier. */
template <int kChunks>
__device__ __forceinline__ KeyTile<kChunks> load_tile(const PrkvItem& item, unsigned char* shared,
                                                      int first, int count) {
  auto& space = *reinterpret_cast<TileSpace*>(shared);
  const KeyTile<kChunks> tile{item, space.steps, reinterpret_cast<char*>(&space + 1), first,
                              min(kLookRows, count - first)};
  const int vectors = int(key_bytes(tile.dim())) / 16;
  for (int i = int(threadIdx.x); i < kLookRows * vectors; i += kLookThreads) {
    const int row = i / vectors, at = i - row * vectors;
    const bool there = row < tile.rows;
    reinterpret_cast<uint4*>(tile.key(row))[at] =
        there ? reinterpret_cast<const uint4*>(item.key(first + row))[at] : uint4{};
  }
  if (int(threadIdx.x) < kLookRows) {
    const bool there = int(threadIdx.x) < tile.rows;
    space.steps[threadIdx.x] = there ? item.steps()[first + int(threadIdx.x)] : 0.0f;
  }
  __syncthreads();
  return tile;
}

/** Whether a query sees a row: it can be kept, and is not later. All rows are new ones. */
__device__ __forceinline__ bool sees(const PrkvItem& item, int asked, int row, float step) {
  return step > 0 && int(item.job.added) + row <= int(item.job.asked.begin) + asked;
}

}  // namespace pariskv::cuda
