/**
 * attend_kept: attention of a kv head's query heads to its resident and its kept rows, in parts
 * that the next kernel adds up. Some blocks for each head, head by head: how many rows a head has
 * is read on the device, so heads with few are done soon and leave the device to others.
 */
#pragma once

#include "device/attend.cuh"
#include "device/attend_direct.cuh"
#include "device/signal.cuh"
#include "hardkv/blocks.cuh"
#include "hardkv/decode/params.h"

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

/** What a block works on: read from device memory once. */
struct KeptContext {
  int row, head;  // of the batch; kv head
  void* const* rows;
  device::KeptHead kept;
  int kept_rows;
  int total;
  int before, gap;  // resident rows before the zone; of it, those that are left out
  float* parts;
  device::AttendShape shape;
};

/** Row i of those that are attended to: before the zone, kept ones, after it. */
struct KeptStepRows {
  const KeptContext& context;
  const device::SegmentDivisor& by_segment;
  int segment_tokens;

  __device__ __forceinline__ char* stored(int position) const {
    const int segment = int(by_segment(position)), slot = position - segment * segment_tokens;
    return static_cast<char*>(context.rows[segment]) +
           (int64_t(context.head) * segment_tokens + slot) * context.shape.row_bytes;
  }
  __device__ __forceinline__ const char* operator()(int i) const {
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

/** False when the lane is nobody's. By one thread. */
__device__ __forceinline__ bool find_kept(const KeptStepParams& params, int index,
                                          KeptContext& context) {
  const KeptDecodeCall& call = params.call;
  const int row = int(params.by_kv_heads(index));
  const Lane& lane = call.lanes[row];
  const SequenceView* layers = lane.layers;
  if (layers == nullptr) return false;
  const SequenceView view = layers[call.layer];  // all of it at once
  const ModelShape& model = call.shape;
  const int head = index - row * int(model.kv_heads);
  context.row = row;
  context.head = head;
  context.rows = view.rows;
  context.kept = {view.kept, model.kept(view.kept_capacity), head};
  context.total = int(view.total);
  context.before = int(view.zone_begin);
  context.gap = view.sparse != 0 ? int(view.zone_end - view.zone_begin) : 0;
  context.kept_rows = context.gap > 0 && view.kept != nullptr ? context.kept.counts()[0] : 0;
  context.parts = reinterpret_cast<float*>(reinterpret_cast<char*>(lane.scratch.resident) +
                                           head * lane.head_bytes);
  context.shape = {int(model.rows.key_dim), int(model.rows.value_dim), int(model.group),
                   int(model.rows.bytes()), call.logits.scale,         call.logits.softcap};
  return true;
}

template <typename Element>
__device__ __forceinline__ Element* element_of(const Rows& tensor, int i, int64_t j) {
  return reinterpret_cast<Element*>(tensor.data) + i * tensor.stride_i + j * tensor.stride_j;
}

/** Attention to a block's share of the rows. */
template <typename Element, int kWords>
struct AttendKept {
  const KeptStepParams& params;
  const KeptContext& context;
  device::Cluster blocks;  // that share the parts of the rows; they never meet
  char* room;              // kKeptBytes
  uint64_t (&barriers)[device::kMostSlots];

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row(const KeptStepRows& rows, const Element* k,
                                                const Element* v) const {
    if (k == nullptr || blocks.rank != blocks.size - 1) return;
    const int key = context.shape.key_dim, all = key + context.shape.value_dim;
    auto* to = reinterpret_cast<Element*>(rows.stored(context.total - 1));
    for (int d = int(threadIdx.x); d < all; d += kKeptThreads<Element>) {
      to[d] = d < key ? k[d] : v[d - key];
    }
  }

  __device__ __forceinline__ void run() const {
    const KeptDecodeCall& call = params.call;
    const KeptStepRows rows{context, params.by_segment, int(call.shape.segment_tokens)};
    const int count = context.total - context.gap + context.kept_rows;
    const bool appends = call.k.data != nullptr;
    const auto* k = appends ? element_of<Element>(call.k, context.row, context.head) : nullptr;
    const auto* v = appends ? element_of<Element>(call.v, context.row, context.head) : nullptr;
    store_new_row(rows, k, v);
    const device::NewRow<Element> new_row{k, v, count - 1};
    const auto* q =
        element_of<Element>(call.q, context.row, int64_t(context.head) * context.shape.group);
    if constexpr (kKeptDirect<Element>) {
      device::DirectAttention<kWords, Element, KeptStepRows> attention(
          context.shape, blocks, *reinterpret_cast<device::DirectSpace<kWords, Element>*>(room),
          count, new_row, rows);
      attention.template run<false>(q, call.q.stride_j, context.parts);
    } else {
      device::init_row_barriers(barriers);
      __syncthreads();
      auto* merge = reinterpret_cast<float*>(room);
      char* slots = room + device::kMergeBytes<kWords>;
      device::RowAttention<kWords, Element, KeptStepRows> attention(
          context.shape, blocks, slots, int(room + kKeptBytes<Element, kWords> - slots), barriers,
          {count}, new_row, rows);
      attention.run(
          q, call.q.stride_j,
          device::PartsInScratch{context.parts, context.shape.group, context.shape.value_dim},
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
  const int rank = int(params.by_heads(int(blockIdx.x)));
  const int index = int(blockIdx.x) - rank * int(params.call.batch * params.call.shape.kv_heads);
  device::let_successor_start();
  if (threadIdx.x == 0) found = find_kept(params, index, context);
  __syncthreads();
  if (found == 0) return;
  AttendKept<Element, kWords>{
      params, context, {params.blocks_per_head, rank}, reinterpret_cast<char*>(shared), barriers}
      .run();
}

}  // namespace pariskv::cuda
