/**
 * attend_kept: attention of a kv head's query heads to its resident and its kept rows, in parts
 * that the next kernel adds up. As many blocks for each head: how many rows a head has is read on
 * the device, so blocks of heads with few are done soon and leave the device to other blocks.
 */
#pragma once

#include "device/attend.cuh"
#include "device/signal.cuh"
#include "kept/decode/attend/part_attention.cuh"
#include "kept/decode/context.cuh"

namespace pariskv::cuda {

template <typename Element>
constexpr int kKeptThreads = kKeptDirect<Element> ? kDirectThreads : device::kThreads;
/** Of rows that go straight, kDirectWarps warps; else eight. */
template <typename Element, int kWords>
constexpr int kKeptRegisters = kWords == 16  ? 240
                               : kWords == 8 ? (kKeptDirect<Element> ? 240 : 128)
                                             : (kKeptDirect<Element> ? 128 : 96);
/** Shared memory, besides a row where they go straight. */
template <typename Element, int kWords>
constexpr int kKeptBytes =
    kKeptDirect<Element> ? int(sizeof(PartSpace<kWords, Element>))
                         : device::kMergeBytes<kWords> + 2 * device::kTileBytes;

/** Row i of a segment of the attended rows: before the zone, kept ones, after it. */
template <typename Element>
struct KeptStepRows {
  using Reader = device::RowReader<Element>;
  static constexpr bool kCounted = false;
  static constexpr device::RowsLess kLess = device::RowsLess::kNothing;

  const KeptContext& context;
  const device::SegmentDivisor& by_segment;
  int segment_tokens;
  int first;

  __device__ __forceinline__ char* stored(int position) const {
    return device::row_of(context.rows, by_segment, segment_tokens, context.head, position,
                          context.shape.row_bytes);
  }
  __device__ __forceinline__ const char* operator()(int row) const {
    const int i = first + row;
    if (i < context.before) return stored(i);
    const int own = i - context.before;
    if (own < context.kept_rows) return context.kept + int64_t(own) * context.shape.row_bytes;
    return stored(i - context.kept_rows + context.gap);
  }
  __device__ __forceinline__ float noted(int, int, float logit) const { return logit; }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

template <typename Element>
__device__ __forceinline__ Element* element_of(const Rows& tensor, int i, int64_t j) {
  return reinterpret_cast<Element*>(tensor.data) + i * tensor.stride_i + j * tensor.stride_j;
}

/** Attention to a block's share of the rows. */
template <typename Element, int kWords>
struct AttendKept {
  const KeptStepParams& params;
  const KeptContext& context;
  int rank;    // of the blocks of a head; they never meet
  char* room;  // kKeptBytes
  uint64_t (&barriers)[device::kMostSlots];

  __device__ __forceinline__ KeptStepRows<Element> rows_from(int first) const {
    return {context, params.by_segment, int(params.call.shape.segment_tokens), first};
  }
  __device__ __forceinline__ const Element* new_part(const Rows& tensor) const {
    return tensor.data == nullptr ? nullptr
                                  : element_of<Element>(tensor, context.row, context.head);
  }
  /** @param first  the row that counts as row 0 */
  __device__ __forceinline__ device::NewRow<Element> new_row(int first) const {
    return {new_part(params.call.k), new_part(params.call.v), context.count() - 1 - first};
  }
  __device__ __forceinline__ const Element* queries() const {
    return element_of<Element>(params.call.q, context.row,
                               int64_t(context.head) * context.shape.group);
  }

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row() const {
    const Element *k = new_part(params.call.k), *v = new_part(params.call.v);
    if (k == nullptr || rank != params.blocks_per_head - 1) return;
    device::RowReader<Element>::write(rows_from(0).stored(context.total - 1), k,
                                      context.shape.key_dim, v, context.shape.value_dim,
                                      int(threadIdx.x), kKeptThreads<Element>);
  }

  /** Whole parts, in registers. */
  __device__ __forceinline__ void attend_parts() const {
    const HeadParts parts = HeadParts::of(context.count());
    if (rank >= parts.count) return;
    PartAttention<kWords, Element, KeptStepRows<Element>> attention(
        context.shape, *reinterpret_cast<PartSpace<kWords, Element>*>(room), parts, rank,
        params.blocks_per_head, new_row(0), rows_from(0));
    attention.run(queries(), params.call.q.stride_j, context.parts);
  }

  /** A segment's parts, through shared memory. */
  __device__ __forceinline__ void attend_segment() const {
    const int size = params.blocks_per_head / kSegments, segment = rank / size;
    const int segments = context.segments();
    if (segment >= segments) return;
    const int all = context.count(), first = all * segment / segments;
    device::init_row_barriers(barriers);
    __syncthreads();
    auto* merge = reinterpret_cast<float*>(room);
    char* slots = room + device::kMergeBytes<kWords>;
    const device::Cluster blocks{size, rank - segment * size};
    device::RowAttention<kWords, Element, KeptStepRows<Element>> attention(
        context.shape, blocks, slots, int(room + kKeptBytes<Element, kWords> - slots), barriers,
        {all * (segment + 1) / segments - first}, new_row(first), rows_from(first));
    attention.run(queries(), params.call.q.stride_j,
                  device::PartsInScratch{context.parts_of(segment), context.shape.group,
                                         context.shape.value_dim},
                  merge);
  }

  __device__ __forceinline__ void run() const {
    store_new_row();
    if constexpr (kKeptDirect<Element>) {
      attend_parts();
    } else {
      attend_segment();
    }
  }
};

template <typename Element, int kWords>
__global__ void __maxnreg__((kKeptRegisters<Element, kWords>))
    attend_kept(const __grid_constant__ KeptStepParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ KeptContext context;
  __shared__ uint64_t barriers[device::kMostSlots];
  __shared__ int found;
  // The first blocks of all heads come first.
  const int rank = int(params.by_heads(int(blockIdx.x)));
  const int index = int(blockIdx.x) - rank * int(params.call.batch * params.call.shape.kv_heads);
  device::let_successor_start();
  if (threadIdx.x == 0) found = find_kept(params, index, context);
  __syncthreads();
  if (found == 0) return;
  AttendKept<Element, kWords>{params, context, rank, reinterpret_cast<char*>(shared), barriers}
      .run();
}

}  // namespace pariskv::cuda
