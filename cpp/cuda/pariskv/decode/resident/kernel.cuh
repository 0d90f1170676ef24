/**
 * attend_resident: attention to a head's resident rows, which needs nothing of a search: a few
 * blocks per kv head do it while score is at work, and make room for blocks that rerank.
 */
#pragma once

#include "device/attend.cuh"
#include "device/attend_direct.cuh"
#include "device/narrow_rows.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/flags.cuh"

namespace pariskv::cuda {

/** Whether rows go straight to the tensor cores. */
template <typename Element>
constexpr bool kDirect = sizeof(Element) == 2;
/**
 * Small blocks, where they can be: one fits beside two that rerank, two beside two that score
 * (with up to 128 dimensions).
 */
template <typename Element>
constexpr int kResidentThreads = kDirect<Element> ? device::kDirectThreads : device::kThreads;

/** Shared memory that attention to resident rows needs, besides a row where they go straight. */
template <typename Element, int kWords, bool kNarrow>
constexpr int kResidentBytes =
    kDirect<Element> ? int(sizeof(device::DirectSpace<kWords, Element, kNarrow>))
                     : device::kMergeBytes<kWords> + 2 * device::kTileBytes;

/** Row i of the tail, or the copy of it. */
__device__ __forceinline__ const char* tail_row(const HeadContext& context, const Tail& tail,
                                                int capacity, int i) {
  if (context.tail_copies == nullptr) {
    const int position = int(tail.position(i));
    return zone_row_in(context, zone_segment(context, position), position);
  }
  return context.tail_copies + (int64_t(context.head) * capacity + i) * context.zone_row_bytes;
}

/** Logits of the tail are stored, and rows whose logit is not finite do not count. */
__device__ __forceinline__ float note_tail(const HeadContext& context, int i, int head,
                                           float logit) {
  const float counts = device::finite(logit) ? logit : -device::infinity();
  const int group = context.shape.group;
  if (head < group) context.scratch.tail_logits[i * group + head] = counts;
  return counts;
}

/** Row i of the resident ones: before the zone, then after it. Or of a tail that is not narrow. */
template <typename Element>
struct ResidentRows {
  using Reader = device::RowReader<Element>;

  const HeadContext& context;
  int before, gap;
  Tail tail;
  float* tail_logits;  // null: not of the tail
  int capacity;        // of tail copies, of a head

  __device__ __forceinline__ const char* operator()(int i) const {
    if (tail_logits == nullptr) return row_at(context, i < before ? i : i + gap);
    return tail_row(context, tail, capacity, i);
  }
  __device__ __forceinline__ float noted(int i, int head, float logit) const {
    return tail_logits == nullptr ? logit : note_tail(context, i, head, logit);
  }
  __device__ __forceinline__ float corrected(int, int, float share, float) const { return share; }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

/** Rows of a narrow tail. */
template <typename Element>
struct NarrowTailRows {
  using Reader = device::NarrowReader<Element>;

  const HeadContext& context;
  Tail tail;
  int capacity;

  __device__ __forceinline__ const char* operator()(int i) const {
    return tail_row(context, tail, capacity, i);
  }
  __device__ __forceinline__ float noted(int i, int head, float logit) const {
    return note_tail(context, i, head, logit);
  }
  __device__ __forceinline__ float corrected(int, int, float share, float) const { return share; }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

template <typename Element, int kWords, bool kMany, bool kNarrow>
struct AttendResident {
  const HeadBlock<Element, kWords>& block;
  device::Cluster blocks;  // that share the parts of the rows; they never meet
  char* room;              // kResidentBytes
  uint64_t (&barriers)[device::kMostSlots];

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row() const {
    if (block.call.k.data == nullptr || blocks.rank != blocks.size - 1) return;
    const HeadContext& context = block.context;
    device::RowReader<Element>::write(row_at(context, context.total - 1),
                                      block.at(block.call.k, context.head), context.shape.key_dim,
                                      block.at(block.call.v, context.head), context.shape.value_dim,
                                      int(threadIdx.x), kResidentThreads<Element>);
  }

  /** Attention to this block's share of some rows. */
  template <typename Rows>
  __device__ __forceinline__ void attend_to(const Rows& rows, const device::AttendShape& shape,
                                            int count, const device::NewRow<Element>& new_row,
                                            float* out) const {
    if constexpr (kDirect<Element>) {
      using Attention = device::DirectAttention<kWords, Element, Rows>;
      Attention attention(shape, blocks, *reinterpret_cast<typename Attention::Space*>(room), count,
                          new_row, rows);
      attention.template run<kMany>(block.queries(), block.call.q.stride_j, out);
    } else {
      device::init_row_barriers(barriers);
      __syncthreads();
      auto* merge = reinterpret_cast<float*>(room);
      char* slots = room + device::kMergeBytes<kWords>;
      device::RowAttention<kWords, Element, Rows> attention(
          shape, blocks, slots, int(room + kResidentBytes<Element, kWords, kNarrow> - slots),
          barriers, {count}, new_row, rows);
      attention.run(block.queries(), block.call.q.stride_j,
                    device::PartsInScratch{out, shape.group, shape.value_dim}, merge);
    }
  }

  /** To resident rows, or to those of a tail that is written like them. */
  __device__ __forceinline__ void attend(bool of_tail) const {
    const HeadContext& context = block.context;
    // Without a search the zone is resident like the rest.
    const int gap = block.searches() ? context.zone.end - context.zone.begin : 0;
    const Tail tail = of_tail ? tail_of(block.call, context) : Tail{};
    if (of_tail && (!block.searches() || tail.count == 0)) return;
    const int count = of_tail ? int(tail.count) : context.total - gap;
    const bool fresh =
        block.call.k.data != nullptr && !of_tail && (gap == 0 || context.zone.end < context.total);
    const device::NewRow<Element> new_row{fresh ? block.at(block.call.k, context.head) : nullptr,
                                          fresh ? block.at(block.call.v, context.head) : nullptr,
                                          count - 1};
    if (!of_tail) store_new_row();
    const HeadScratch& scratch = context.scratch;
    attend_to(ResidentRows<Element>{context, context.zone.begin, gap, tail,
                                    of_tail ? scratch.tail_logits : nullptr,
                                    int(Tail::capacity(block.call.tail_rows))},
              context.shape, count, new_row, of_tail ? scratch.sampled : scratch.resident);
  }

  /** Apart from the other one, so that neither costs the other registers. */
  __device__ __forceinline__ void attend_narrow_tail() const {
    const HeadContext& context = block.context;
    if (!block.searches()) return;
    const Tail tail = tail_of(block.call, context);
    if (tail.count == 0) return;
    device::AttendShape shape = context.shape;
    take_zone_rows(block.call.shape, shape);
    attend_to(NarrowTailRows<Element>{context, tail, int(Tail::capacity(block.call.tail_rows))},
              shape, int(tail.count), {nullptr, nullptr, 0}, context.scratch.sampled);
  }
};

/** A block with so many parts gives each to a warp. */
constexpr int kManyParts = device::kDirectWarps;
/** Not where rows come through shared memory, nor of 256 dimensions: too many for a warp. */
template <typename Element, int kWords>
constexpr bool kTakesMany = kDirect<Element> && kWords < 8;

template <typename Element, int kWords, bool kMany, bool kNarrow>
__global__ void __maxnreg__(kRegistersBesideScore<kWords>)
    attend_resident_kernel(const __grid_constant__ ResidentParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ HeadContext context;
  __shared__ uint64_t barriers[device::kMostSlots];
  // The first blocks of all heads come first: they start beside score. Blocks of tails come last.
  const uint32_t turn = params.by_heads(int(blockIdx.x));
  const uint32_t index = blockIdx.x - turn * uint32_t(params.call.heads);
  const bool of_tail = int(turn) >= params.blocks_per_head;
  const int rank = int(turn) - (of_tail ? params.blocks_per_head : 0);
  device::let_successor_start();
  if (find_context<Element>(params, index, context)) {
    __syncthreads();
    const HeadBlock<Element, kWords> block{params.call, context};
    const AttendResident<Element, kWords, kMany, kNarrow> attend{
        block, {params.blocks_per_head, rank}, reinterpret_cast<char*>(shared), barriers};
    if (params.call.dense_apart && !block.searches()) {
      // attend_dense has done it.
    } else if (kNarrow && of_tail) {
      attend.attend_narrow_tail();
    } else {
      attend.attend(!kNarrow && of_tail);
    }
    if (params.sets_flags && block.searches() && !of_tail) {
      ReadyFlags{context.scratch.flags}.set(ReadyFlags::kAttended + rank, params.token);
    }
  }
  // One that ends after score is enough: until then this kernel has not ended.
  if (blockIdx.x == 0) device::wait_for_predecessor();
}

}  // namespace pariskv::cuda
