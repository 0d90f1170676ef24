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
 */
#pragma once

#include "device/attend_pair.cuh"
#include "device/attend_shape.cuh"
#include "device/copy.cuh"
#include "device/softmax.cuh"
#include "device/stored_rows.cuh"
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
__device__ __forceinline__ void init_row_barriers(uint64_t (&barriers)[kMostSlots]) {
  if (int(threadIdx.x) < kMostSlots) {
    ptx::mbarrier_init(&barriers[threadIdx.x], kWarps * RowCopies::kArrivals);
  }
  ptx::fence_proxy_async_shared();
}

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
                                        float weighted) const {
    float* to = this->part(part, head);
    const int d = 32 * chunk + lane_id();
    if (chunk == 0 && lane_id() == 0) to[0] = maximum, to[1] = sum;
    if (d < value_dim) to[2 + d] = weighted;
  }
};

/** Attention over rows by one block: its parts of them. All threads take part. */
template <int kWords, typename Element, typename Address, typename PartsOf = EvenParts,
          typename Caching = CacheNothing>
class RowAttention {
 public:
  /**
   * @param slots     shared memory for tiles, `bytes` of it
   * @param barriers  (kMostSlots)
   * @param parts     which rows a part has, as EvenParts
   * @param address   Reader: of the rows, as RowReader. address(i) is where row i lies; not asked
   *                  for the new row. is_placed(i): whether there is a copy in shared memory,
   *                  after await_placed(), in the room placed(i). noted(i, head, logit): the logit
   *                  that counts. kCounted: whether rows may have been counted before, with a share
   *                  that they are now to lose: logit_before(i, head) and weight_before() say
   *                  which, and counted(i) is the copy that row i was counted by, or null. kLess:
   *                  what rows lack, see RowsLess
   * @param caching   which rows go to a row cache as well, as CacheNothing and CacheRows
   */
  __device__ __forceinline__ RowAttention(const AttendShape& shape, const Cluster& cluster,
                                          char* slots, int bytes, uint64_t* barriers,
                                          const PartsOf& parts, const NewRow<Element>& new_row,
                                          Address address, const Caching& caching = Caching())
      : shape_(shape),
        cluster_(cluster),
        slots_(slots),
        barriers_(barriers),
        parts_(parts),
        new_row_(new_row),
        address_(address),
        caching_(caching) {
    // Of the most rows that a part has, so that small parts do not waste slots.
    tile_rows_ = min(min(kTileBytes / shape.row_room, kMostTileRows), parts.most());
    tile_rows_ = max(tile_rows_, 1);
    count_ = min(bytes / (tile_rows_ * shape.row_room), kMostSlots);
  }

  /**
   * All heads of the group, some at a time. Ends with a barrier.
   * @param q      (group, key_dim), `stride` elements apart
   * @param out    where parts are left, as PartsInScratch
   * @param merge  kMergeBytes of shared memory
   */
  template <typename Out>
  __device__ __forceinline__ void run(const Element* q, int64_t stride, const Out& out,
                                      float* merge) {
    start();
    finish(q, stride, out, merge);
  }
  /** The first half of it: copies of the first rows start. */
  __device__ __forceinline__ void start() {
    prime();
    caching_.start(parts_.begin(cluster_.first_part()), parts_.begin(cluster_.end_part()));
  }
  /** The second one: waits for rows, attends to them, copies the rest. */
  template <typename Out>
  __device__ __forceinline__ void finish(const Element* q, int64_t stride, const Out& out,
                                         float* merge) {
#pragma unroll 1
    for (int first_head = 0; first_head < shape_.group; first_head += kHeadsPerPass) {
#pragma unroll 1
      for (int first_value = 0; first_value < shape_.value_dim; first_value += 32 * kWords) {
        if (first_head > 0 || first_value > 0) prime();
        pass(q, stride, first_head, first_value, out, merge);
      }
    }
  }

 private:
  using Reader = typename Address::Reader;

  /** Queries for rows that lack something; returns the shift of the lane's head. */
  __device__ __forceinline__ float take_common(float (&query)[4][kWords], int at,
                                               bool there) const {
    float shift = 0;
    if constexpr (Address::kLess != RowsLess::kNothing) {
      if constexpr (Address::kLess == RowsLess::kBase) {
        if (!address_.base().any()) return 0;
      }
      // Asked for together, so that this is one trip to memory.
      float units[kWords] = {}, centres[kWords] = {};
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (!there) continue;
        if constexpr (Address::kLess == RowsLess::kBase) {
          units[i] = address_.base().stretch()[at + i];
          centres[i] = address_.base().centre(at + i);
        } else {
          units[i] = address_.common().key_unit()[at + i];
          centres[i] = address_.common().key_centre()[at + i];
        }
      }
      float dots[4] = {};
#pragma unroll
      for (int h = 0; h < 4; ++h) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const float own = query[h][i];
          query[h][i] = __fmul_rn(own, units[i]);
          // Narrow rows lack a balanced centre.
          const float met = Address::kLess == RowsLess::kBase ? query[h][i] : own;
          dots[h] = __fmaf_rn(met, centres[i], dots[h]);
        }
      }
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const float dot = warp_sum(dots[h]);
        if (lane_id() / 4 % 4 == h) shift = dot * shape_.scale;
      }
    }
    return shift;
  }

  /** Sets the first tiles on their way. */
  __device__ __forceinline__ void prime() {
    cursor_.start(cluster_, parts_);
#pragma unroll 1
    for (int i = 0; i < count_ && cursor_.left(); ++i) copy_next();
  }
  /**
   * Heads [first_head, first_head + kHeadsPerPass) of the group, dimensions of values from
   * first_value on; the first tiles are coming.
   */
  template <typename Out>
  __device__ __forceinline__ void pass(const Element* q, int64_t stride, int first_head,
                                       int first_value, const Out& out, float* merge) {
    const int heads = min(shape_.group - first_head, kHeadsPerPass);
    // Warps share the heads by fours, and what is left of them the rows.
    const int quads = heads > 8 ? 4 : heads > 4 ? 2 : 1;
    const int strands = kWarps / quads;
    const int quad = warp_id() % quads, strand = warp_id() / quads;
    const int at = kWords * lane_id();
    const int value = first_value + at;
    const LaneNumbers mine{at < shape_.key_dim ? Reader::offset(at) : -1,
                           value < shape_.value_dim
                               ? Reader::value_offset(shape_.key_dim) + Reader::offset(value)
                               : -1,
                           value < shape_.value_dim ? value : -1};
    float query[4][kWords];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const int head = first_head + 4 * quad + h;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        query[h][i] =
            mine.key >= 0 && head < shape_.group ? to_float(q[head * stride + at + i]) : 0.0f;
      }
    }
    const float shift = take_common(query, at, mine.key >= 0);
    Running<kWords> running;
#pragma unroll 1
    for (int part = cluster_.first_part(); part < cluster_.end_part(); ++part) {
      running.clear();
      const int end = parts_.begin(part + 1);
#pragma unroll 1
      for (int row = parts_.begin(part); row < end; row += tile_rows_) {
        const int count = min(tile_rows_, end - row);
        const int mine_to_cache = warp_id() + kWarps * lane_id();
        const bool caches = first_head == 0 && first_value == 0 && mine_to_cache < count;
        const int cache_slot = caches ? caching_.slot_of(row + mine_to_cache) : -1;
        wait(&barriers_[read_], parity_ >> read_ & 1);
        address_.await_placed();
        parity_ ^= 1u << read_;
        const char* slot = slots_ + read_ * tile_rows_ * shape_.row_room;
        // Where the copy of row i of the tile begins, and the row in it.
        const auto copy_of = [&](int i) {
          const char* room =
              address_.is_placed(row + i) ? address_.placed(row + i) : slot + i * shape_.row_room;
          return Reader::kScaled ? room + Reader::place(address_(row + i)) : room;
        };
        const auto row_at = [&](int i) {
          return Reader::kScaled ? copy_of(i) + Reader::lead(address_(row + i)) : copy_of(i);
        };
        caching_.put(cache_slot, copy_of);
#pragma unroll 1
        for (int i = strand; i < count; i += 2 * strands) {
          const bool both = i + strands < count;
          const int other = both ? i + strands : i;
          attend_pair<kWords>(query, row_at(i), row_at(other), both, address_,
                              {row + i, row + other}, first_head + 4 * quad + lane_id() / 4 % 4,
                              shift, mine, shape_, running);
        }
        if (++read_ == count_) read_ = 0;
        caching_.release();
        __syncthreads();
        if (cursor_.left()) copy_next();
      }
      merge_strands(running, quads, first_head, first_value / 32, part, out, merge);
    }
  }
  /** Rows of the tile to be copied next. */
  __device__ __forceinline__ int tile_count() const {
    return min(tile_rows_, cursor_.end_row - cursor_.row);
  }
  __device__ __forceinline__ void advance(int count) {
    if (++fill_ == count_) fill_ = 0;
    cursor_.row += count;
    cursor_.settle(parts_);
  }
  __device__ __forceinline__ void copy_next() {
    char* slot = slots_ + fill_ * tile_rows_ * shape_.row_room;
    uint64_t* barrier = &barriers_[fill_];
    const int count = tile_count();
    const int row = cursor_.row;
    // Row i of the tile is brought by warp i % kWarps.
    const int mine = (count - warp_id() + kWarps - 1) / kWarps;
    RowCopies::each(mine, [&](int k) {
      const int i = warp_id() + kWarps * k;
      if (new_row_.k != nullptr && row + i == new_row_.index) return;
      if (address_.is_placed(row + i)) return;
      RowCopies::expect(barrier, uint32_t(shape_.row_bytes));
      const char* from = address_(row + i);
      RowCopies::start(slot + i * shape_.row_room + Reader::place(from), from - Reader::lead(from),
                       uint32_t(shape_.row_bytes), barrier);
    });
    const int fresh = new_row_.index - row;
    if (new_row_.k != nullptr && fresh >= 0 && fresh < count && fresh % kWarps == warp_id()) {
      if constexpr (!Reader::kScaled) {  // no row of a zone is new
        Reader::write(slot + fresh * shape_.row_room, new_row_.k, shape_.key_dim, new_row_.v,
                      shape_.value_dim, lane_id(), 32);
      }
      ptx::fence_proxy_async_shared();  // that will use this slot again
    }
    RowCopies::finish(barrier);
    advance(count);
  }
  /** Puts the strands of a part together, in order, and writes them out. Ends with a barrier. */
  template <typename Out>
  __device__ __forceinline__ void merge_strands(const Running<kWords>& running, int quads,
                                                int first_head, int first_chunk, int part,
                                                const Out& out, float* merge) {
    constexpr int kAtOnce = kHeadsAtOnce<kWords>;
    constexpr int kFloats = kStrandFloats<kWords>;
    const int quad = warp_id() % quads, strand = warp_id() / quads, strands = kWarps / quads;
#pragma unroll
    for (int begin = 0; begin < 4; begin += kAtOnce) {
      float* place = merge + (strand * quads + quad) * kAtOnce * kFloats;
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h) {
#pragma unroll
        for (int i = 0; i < kWords; i += 2) {
          *reinterpret_cast<float2*>(place + h * kFloats + kWords * lane_id() + i) =
              make_float2(running.weighted[begin + h][i], running.weighted[begin + h][i + 1]);
        }
        if (lane_id() == 4 * (begin + h)) {
          place[h * kFloats + 32 * kWords] = running.maximum;
          place[h * kFloats + 32 * kWords + 1] = running.sum;
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int task = warp_id(); task < quads * kAtOnce * kWords; task += kWarps) {
        const int column = task / kWords, chunk = task % kWords;  // column: quad, head of it
        const int head = first_head + column / kAtOnce * 4 + begin + column % kAtOnce;
        const int d = 32 * chunk + lane_id();
        const float* strand_of = merge + column * kFloats;
        const int step = quads * kAtOnce * kFloats;
        float maximum = -infinity(), sum = 0;
        if (lane_id() < strands) {
          maximum = strand_of[lane_id() * step + 32 * kWords];
          sum = strand_of[lane_id() * step + 32 * kWords + 1];
        }
        const float top = warp_max(maximum);
        const float factor = maximum == -infinity() ? 0.0f : exp_of(maximum - top);
        sum = warp_sum(sum * factor);
        float weighted = 0;
#pragma unroll
        for (int s = 0; s < kWarps; ++s) {
          if (s == strands) break;
          weighted = __fmaf_rn(__shfl_sync(~0u, factor, s), strand_of[s * step + d], weighted);
        }
        if (head < shape_.group) out.leave(part, head, first_chunk + chunk, top, sum, weighted);
      }
      __syncthreads();
    }
  }

  const AttendShape& shape_;
  const Cluster& cluster_;
  char* slots_;
  uint64_t* barriers_;
  PartsOf parts_;
  NewRow<Element> new_row_;
  Address address_;
  Caching caching_;
  int tile_rows_, count_;
  TileCursor cursor_;
  int fill_ = 0, read_ = 0;
  uint32_t parity_ = 0;  // bit s: of the next phase of slot s
};

}  // namespace pariskv::cuda::device
