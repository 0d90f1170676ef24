/**
 * Rows that start early. While the blocks of a cluster still decide on the last of the top k, some
 * rows are already certain to be selected: their copies start then, into room of their own, and
 * attention finds them there. Only where a launch says `start_rows_early`, and where there is a
 * copy engine: of many heads, the rows of some keep the bus busy anyway.
 *
 * | step | by | when |
 * | --- | --- | --- |
 * | `open` | one thread | the block starts |
 * | `start` | the thread that has the row | the first exchange of the top k says that it passes |
 * | `note` | the same thread | the row's index among the block's selected rows is known |
 * | `close` | one thread | after all of these: no row starts any more |
 * | `is_placed`, `row` | all threads | after the barrier of the block that follows `close` |
 * | `wait` | all threads | before a row is read |
 *
 * Of use once in a launch. Definitions are in early_rows_impl.cuh.
 */
#pragma once

#include "device/tiles.cuh"

namespace pariskv::cuda {

/** Rows that are listed in shared memory, where a block attends to no more. */
constexpr int kListedRows = 512;
/** Room for rows that start early, and how many have room at most. */
constexpr int kEarlyBytes = 8192;
constexpr int kEarlyRows = 32;

/** Of a block, in shared memory. */
struct EarlyRows {
  uint64_t arrived;  // a barrier: rows that have started, and `close`
  int count;         // rows that have started, or found no room
  device::SelectedRow list[kEarlyRows];
  uint8_t places[kListedRows];  // of selected rows: where among the early ones they are, plus 1
  alignas(128) char rows[kEarlyBytes];

  /** Before what makes barriers known to the copy engine. */
  __device__ __forceinline__ void open();

  /**
   * Starts the copy of a row, where there is room.
   * @param find  find() is the row
   * @return its place, plus 1; 0: there is no room
   */
  template <typename Find>
  __device__ __forceinline__ int start(int row_bytes, Find find);

  /** Selected row `at` of this block has this place, as `start` returns it. */
  __device__ __forceinline__ void note(int at, int place) { places[at] = uint8_t(place); }
  __device__ __forceinline__ void close();

  __device__ __forceinline__ bool is_placed(int at) const;
  __device__ __forceinline__ const char* row(int at, int row_bytes) const {
    return rows + (places[at] - 1) * row_bytes;
  }
  __device__ __forceinline__ void wait();
};
static_assert(kEarlyRows < 256, "a place is a byte");

}  // namespace pariskv::cuda
