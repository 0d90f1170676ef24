/**
 * Attention of the query heads of one kv head over rows that lie anywhere, in device memory or in
 * the host's. Rows come in tiles, several on their way at once, into slots of shared memory; some
 * may have come before, and are placed elsewhere.
 *
 * The rows lie in kParts parts, whatever the number of blocks, and a part in strands: row i
 * of a tile belongs to strand i % strands, which one warp follows with a running softmax for four
 * query heads. A lane holds kWords neighbouring dimensions; values with more than 32 kWords take
 * further passes, one for each block of so many. At the end of a part its strands are put together,
 * in order, and written out: maximum, sum, weighted values.
 * Definitions are in attend_impl.cuh.
 */
#pragma once

#include "device/attend_shape.cuh"
#include "device/tiles.cuh"

namespace pariskv::cuda::device {

/** Query heads that share one pass over the rows; more come in further passes. */
constexpr int kHeadsPerPass = 16;

/** Floats of one strand and head in the space where strands are put together. */
template <int kWords>
constexpr int kStrandFloats = 32 * kWords + 4;
/** Heads of a warp that are put together at a time. */
template <int kWords>
constexpr int kHeadsAtOnce = kWords == 16  ? 1
                             : kWords == 8 ? 2
                                           : 4;
template <int kWords>
constexpr int kMergeBytes = kWarps * kHeadsAtOnce<kWords> * kStrandFloats<kWords> * 4;
static_assert(kMergeBytes<2> % 128 == 0 && kMergeBytes<4> % 128 == 0 && kMergeBytes<8> % 128 == 0 &&
                  kMergeBytes<16> % 128 == 0,
              "slots come after it");

/** Makes the barriers of a RowAttention. Before a barrier of the block. */
__device__ __forceinline__ void init_row_barriers(uint64_t (&barriers)[kMostSlots]);

/** Where the parts of a head's attention are left: (kParts, group, 2 + value_dim). */
struct PartsInScratch {
  float* parts;
  int group, value_dim;

  /** The numbers of one part of one head. */
  __device__ __forceinline__ float* part(int part, int head) const {
    return parts + (int64_t(part) * group + head) * (2 + value_dim);
  }
  /** A warp has 32 dimensions of a part, from 32 `chunk` on; a lane `weighted` of one of them. */
  __device__ __forceinline__ void leave(int part, int head, int chunk, float maximum, float sum,
                                        float weighted) const;
};

/** Running softmaxes of a warp's four query heads. */
template <int kWords>
struct Running;

/** Attention over rows by one block: its parts of them. All threads take part. */
template <int kWords, typename Element, typename Address, typename PartsOf = EvenParts,
          typename Keep = KeepNothing>
class RowAttention {
 public:
  /**
   * @param slots     shared memory for tiles, `bytes` of it
   * @param barriers  (kMostSlots)
   * @param parts     which rows a part has, as EvenParts
   * @param address   address(i) is where row i lies; not asked for the new row. is_placed(i):
   *                  whether it is in shared memory already, after await_placed(), at placed(i).
   *                  noted(i, head, logit): the logit that counts. corrected(i, head, share,
   *                  shift): the share that counts, where it is e^(logit - shift).
   *                  hides_values(i, logit), with kHides: whether what is not finite of the row's
   *                  values is left out
   * @param keep      what becomes of the rows besides, as KeepNothing and KeepInCache
   */
  __device__ __forceinline__ RowAttention(const AttendShape& shape, const Cluster& cluster,
                                          char* slots, int bytes, uint64_t* barriers,
                                          const PartsOf& parts, const NewRow<Element>& new_row,
                                          Address address, const Keep& keep = Keep());

  /**
   * All heads of the group, some at a time. Ends with a barrier.
   * @param q      (group, key_dim), `stride` elements apart
   * @param out    where parts are left, as PartsInScratch
   * @param merge  kMergeBytes of shared memory
   */
  template <typename Out>
  __device__ __forceinline__ void run(const Element* q, int64_t stride, const Out& out,
                                      float* merge);
  /** The first half of it: copies of the first rows start. */
  __device__ __forceinline__ void start();
  /** The second one: waits for rows, attends to them, copies the rest. */
  template <typename Out>
  __device__ __forceinline__ void finish(const Element* q, int64_t stride, const Out& out,
                                         float* merge);

 private:
  __device__ __forceinline__ void prime();
  template <typename Out>
  __device__ __forceinline__ void pass(const Element* q, int64_t stride, int first_head,
                                       int first_value, const Out& out, float* merge);
  __device__ __forceinline__ int tile_count() const;
  __device__ __forceinline__ void advance(int count);
  __device__ __forceinline__ void copy_next();
  template <typename Out>
  __device__ __forceinline__ void merge_strands(const Running<kWords>& running, int quads,
                                                int first_head, int first_chunk, int part,
                                                const Out& out, float* merge);

  const AttendShape& shape_;
  const Cluster& cluster_;
  char* slots_;
  uint64_t* barriers_;
  PartsOf parts_;
  NewRow<Element> new_row_;
  Address address_;
  Keep keep_;
  int tile_rows_, count_;
  TileCursor cursor_;
  int fill_ = 0, read_ = 0;
  uint32_t parity_ = 0;  // bit s: of the next phase of slot s
};

}  // namespace pariskv::cuda::device
