/** Rows on their way to attention: which parts they lie in, which come next. */
#pragma once

#include "device/cluster.cuh"
#include "device/partition.cuh"

namespace pariskv::cuda::device {

/** Bytes that a tile has at most; it has at most kMostTileRows rows. */
constexpr int kTileBytes = 16384;
constexpr int kMostTileRows = 64;
constexpr int kMostSlots = 8;
static_assert(kMostTileRows <= 32 * kWarps);  // a lane can have a row of a tile

/** A row that has been selected. */
struct alignas(16) SelectedRow {
  uint64_t address;
  int32_t fresh;  // its position when the row cache lacks it, then the slot it goes to; negative:
                  // none
  int32_t where;  // its part, and above 8 bits its number in the tail, from 1 on; 0: not there
};

/** What becomes of rows that have been attended to: nothing. */
struct CacheNothing {
  __device__ __forceinline__ void start(int, int) const {}
  __device__ __forceinline__ int slot_of(int) const { return -1; }
  template <typename CopyOf>
  __device__ __forceinline__ void put(int, CopyOf) const {}
  __device__ __forceinline__ void release() const {}
};

/** The token of this step, which may not be in the store yet. */
template <typename Element>
struct NewRow {
  const Element* k;  // null: it is in the store like the others
  const Element* v;
  int index;  // among the rows
};

/** Rows of which all parts have as many, or one more. */
struct EvenParts {
  int rows;

  __device__ __forceinline__ int begin(int part) const { return part_begin(rows, part); }
  /** Rows that a part has at most. */
  __device__ __forceinline__ int most() const { return (rows + kParts - 1) / kParts; }
};

/** Which rows of which part come next. */
struct TileCursor {
  int part, end_part;
  int row, end_row;

  template <typename PartsOf>
  __device__ __forceinline__ void start(const Cluster& cluster, const PartsOf& parts) {
    part = cluster.first_part() - 1;
    end_part = cluster.end_part();
    row = end_row = 0;
    settle(parts);
  }
  /** On to the next part with rows when this one is through. */
  template <typename PartsOf>
  __device__ __forceinline__ void settle(const PartsOf& parts) {
    while (row >= end_row && part < end_part) {
      if (++part == end_part) return;
      row = parts.begin(part);
      end_row = parts.begin(part + 1);
    }
  }
  __device__ __forceinline__ bool left() const { return part < end_part; }
};

}  // namespace pariskv::cuda::device
