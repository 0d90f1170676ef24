/**
 * The work of attend_dense: the rows of all kv heads of all sequences that are attended to in
 * full, one after the other, and each block takes a stretch of them. Rows of a head are cut into
 * pieces by their number alone, so that sums are the same bits whatever a sequence is batched with.
 */
#pragma once

#include "device/partition.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/call.h"
#include "policy/pariskv/plan.h"

namespace pariskv::cuda {

constexpr int kDenseWarps = 4;
constexpr int kDenseThreads = 32 * kDenseWarps;
/** Rows that a warp looks at in one step, in shared memory. */
constexpr int kDenseTile = 16;
/**
 * Rows of a piece at least: warps take tiles of it in turns. Part of the result: sums are made
 * piece by piece.
 */
constexpr int kLeastPiece = 512;

/** Rows of a piece of so many; there are at most kParts pieces. */
__device__ __forceinline__ int piece_rows(int total) {
  constexpr int kTurn = kDenseWarps * kDenseTile;
  const int each = (total + device::kParts - 1) / device::kParts;
  return max(kLeastPiece, (each + kTurn - 1) / kTurn * kTurn);
}

/** Some rows of a head. */
struct DensePiece {
  bool left;  // false: there are no more
  int sequence, head;
  int begin, end;
};

class DenseWork {
 public:
  /** Looks at the sequences of a launch; all threads, together. */
  __device__ __forceinline__ void look_at(const DecodeCall& call, int first_slot, int count) {
    const int thread = int(threadIdx.x);
    constexpr int kEach = int(kMostDense) / kDenseThreads;
    int64_t own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int s = kEach * thread + i;
      int total = 0;
      bool searched = false;
      if (s < count) {
        const ParisKVSlot& slot = call.slots[first_slot + s];
        if (slot.layers != nullptr) {
          const SequenceView& view = slot.layers[call.layer];
          searched = !view.dense();
          if (!searched) total = int(view.total);
          segments_[s] = view.rows;
        }
      }
      total_[s] = total, searched_[s] = searched;
      own += int64_t(total) * call.shape.kv_heads;
    }
    int64_t before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, before, step);
      if (device::lane_id() >= step) before += other;
    }
    if (device::lane_id() == 31) sums_[device::warp_id()] = before;
    __syncthreads();
    before -= own;
    for (int w = 0; w < device::warp_id(); ++w) before += sums_[w];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int s = kEach * thread + i;
      before_[s] = before;
      before += int64_t(total_[s]) * call.shape.kv_heads;
    }
    if (thread == kDenseThreads - 1) all_ = before;
    if (thread == 0) count_ = count, kv_heads_ = int(call.shape.kv_heads);
    __syncthreads();
  }

  __device__ __forceinline__ int total(int sequence) const { return total_[sequence]; }
  __device__ __forceinline__ bool searched(int sequence) const { return searched_[sequence]; }
  __device__ __forceinline__ void* const* segments(int sequence) const {
    return segments_[sequence];
  }
  /** Where the stretch of a block begins. */
  __device__ __forceinline__ int64_t stretch(int block, int blocks) const {
    const int64_t each = (all_ + blocks - 1) / blocks;
    return min(all_, each * block);
  }

  /** The first piece that begins at a row of all, or behind it, and before `stop`. */
  __device__ __forceinline__ DensePiece find(int64_t at, int64_t stop) const {
    DensePiece piece{};
    if (at >= stop) return piece;
    int low = 0, high = count_;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (before_[middle] <= at ? low : high) = middle;
    }
    const int total = total_[low];
    const int64_t rest = at - before_[low];
    piece.sequence = low;
    piece.head = int(rest / total);
    const int row = int(rest - int64_t(piece.head) * total), rows = piece_rows(total);
    piece.begin = (row + rows - 1) / rows * rows;
    settle(piece, stop);
    return piece;
  }
  /** On to the next one. */
  __device__ __forceinline__ void advance(DensePiece& piece, int64_t stop) const {
    piece.begin = piece.end;
    settle(piece, stop);
  }

 private:
  /** From a piece that may begin behind the rows of its head to one that there is. */
  __device__ __forceinline__ void settle(DensePiece& piece, int64_t stop) const {
    if (piece.begin >= total_[piece.sequence]) piece.begin = 0, ++piece.head;
    if (piece.head == kv_heads_) {
      piece.head = 0;
      while (++piece.sequence < count_ && total_[piece.sequence] == 0) {
      }
    }
    piece.left = false;
    if (piece.sequence >= count_) return;
    const int total = total_[piece.sequence];
    piece.end = min(total, piece.begin + piece_rows(total));
    piece.left = before_[piece.sequence] + int64_t(piece.head) * total + piece.begin < stop;
  }

  int64_t before_[kMostDense];         // rows of all kv heads before a sequence's
  void* const* segments_[kMostDense];  // of a sequence's rows
  int total_[kMostDense];              // 0: it is searched, or idle
  bool searched_[kMostDense];
  int64_t sums_[kDenseWarps], all_;
  int count_, kv_heads_;
};

}  // namespace pariskv::cuda
