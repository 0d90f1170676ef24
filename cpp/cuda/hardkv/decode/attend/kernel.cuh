/**
 * attend_kept: attention of a kv head's query heads to its resident and its kept rows, in parts
 * that the next kernel adds up. As many blocks for each head: how many rows a head has is read on
 * the device, so blocks of heads with few are done soon and leave the device to others.
 */
#pragma once

#include "device/attend.cuh"
#include "device/attend_direct.cuh"
#include "device/signal.cuh"
#include "hardkv/decode/context.cuh"

namespace pariskv::cuda {

/** Whether rows go straight to the tensor cores. */
template <typename Element>
constexpr bool kKeptDirect = sizeof(Element) == 2;
template <typename Element>
constexpr int kKeptThreads = kKeptDirect<Element> ? device::kDirectThreads : device::kThreads;
template <int kWords>
constexpr int kKeptRegisters = kWords == 16  ? 240
                               : kWords == 8 ? 128
                                             : 96;
/** Shared memory, besides a row where they go straight. */
template <typename Element, int kWords>
constexpr int kKeptBytes =
    kKeptDirect<Element> ? int(sizeof(device::DirectSpace<kWords, Element>))
                         : device::kMergeBytes<kWords> + 2 * device::kTileBytes;

/** Row i of a segment of those that are attended to: before the zone, kept ones, after it. */
struct KeptStepRows {
  const KeptContext& context;
  const device::SegmentDivisor& by_segment;
  int segment_tokens;
  int first;

  __device__ __forceinline__ char* stored(int position) const {
    const int segment = int(by_segment(position)), slot = position - segment * segment_tokens;
    return static_cast<char*>(context.rows[segment]) +
           (int64_t(context.head) * segment_tokens + slot) * context.shape.row_bytes;
  }
  __device__ __forceinline__ const char* operator()(int row) const {
    const int i = first + row;
    if (i < context.before) return stored(i);
    const int own = i - context.before;
    if (own < context.kept_rows) return context.kept.row(own);
    return stored(i - context.kept_rows + context.gap);
  }
  __device__ __forceinline__ float noted(int, int, float logit) const { return logit; }
  __device__ __forceinline__ float corrected(int, int, float share, float) const { return share; }
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
  int segment;
  device::Cluster blocks;  // that share the parts of the segment; they never meet
  char* room;              // kKeptBytes
  uint64_t (&barriers)[device::kMostSlots];

  __device__ __forceinline__ KeptStepRows rows_from(int first) const {
    return {context, params.by_segment, int(params.call.shape.segment_tokens), first};
  }
  __device__ __forceinline__ const Element* new_part(const Rows& tensor) const {
    return tensor.data == nullptr ? nullptr
                                  : element_of<Element>(tensor, context.row, context.head);
  }

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row() const {
    const Element *k = new_part(params.call.k), *v = new_part(params.call.v);
    if (k == nullptr || segment != kSegments - 1 || blocks.rank != blocks.size - 1) return;
    const int key = context.shape.key_dim, all = key + context.shape.value_dim;
    auto* to = reinterpret_cast<Element*>(rows_from(0).stored(context.total - 1));
    for (int d = int(threadIdx.x); d < all; d += kKeptThreads<Element>) {
      to[d] = d < key ? k[d] : v[d - key];
    }
  }

  __device__ __forceinline__ void run() const {
    const KeptDecodeCall& call = params.call;
    store_new_row();
    const int segments = context.segments();
    if (segment >= segments) return;
    const int all = context.count(), first = all * segment / segments;
    const int count = all * (segment + 1) / segments - first;
    const KeptStepRows rows = rows_from(first);
    const device::NewRow<Element> new_row{new_part(call.k), new_part(call.v), all - 1 - first};
    const auto* q =
        element_of<Element>(call.q, context.row, int64_t(context.head) * context.shape.group);
    float* parts = context.parts_of(segment);
    if constexpr (kKeptDirect<Element>) {
      device::DirectAttention<kWords, Element, KeptStepRows> attention(
          context.shape, blocks, *reinterpret_cast<device::DirectSpace<kWords, Element>*>(room),
          count, new_row, rows);
      attention.template run<false>(q, call.q.stride_j, parts);
    } else {
      device::init_row_barriers(barriers);
      __syncthreads();
      auto* merge = reinterpret_cast<float*>(room);
      char* slots = room + device::kMergeBytes<kWords>;
      device::RowAttention<kWords, Element, KeptStepRows> attention(
          context.shape, blocks, slots, int(room + kKeptBytes<Element, kWords> - slots), barriers,
          {count}, new_row, rows);
      attention.run(q, call.q.stride_j,
                    device::PartsInScratch{parts, context.shape.group, context.shape.value_dim},
                    merge);
    }
  }
};

template <typename Element, int kWords>
__global__ void __maxnreg__(kKeptRegisters<kWords>)
    attend_kept(const __grid_constant__ KeptStepParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ KeptContext context;
  __shared__ uint64_t barriers[device::kMostSlots];
  __shared__ int found;
  // The first blocks of all heads come first.
  const int turn = int(params.by_heads(int(blockIdx.x)));
  const int index = int(blockIdx.x) - turn * int(params.call.batch * params.call.shape.kv_heads);
  const int size = params.blocks_per_segment, segment = turn >> device::log2_of_power(size);
  device::let_successor_start();
  if (threadIdx.x == 0) found = find_kept(params, index, context);
  __syncthreads();
  if (found == 0) return;
  AttendKept<Element, kWords>{
      params,  context, segment, {size, turn & (size - 1)}, reinterpret_cast<char*>(shared),
      barriers}
      .run();
}

}  // namespace pariskv::cuda
