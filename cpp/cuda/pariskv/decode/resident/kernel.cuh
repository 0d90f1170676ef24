/**
 * attend_resident and attend_tail: attention to a head's resident rows, and to its tail, which need
 * nothing of a search. A few blocks per kv head do each while score is at work, and make room for
 * blocks that rerank. Two kernels, since the registers of one do not hold both.
 */
#pragma once

#include "device/attend.cuh"
#include "device/attend_direct.cuh"
#include "device/narrow_rows.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/flags.cuh"
#include "pariskv/decode/resident/tail.cuh"

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

/** Shared memory that attention to resident rows needs, besides a row where they go straight; and
 * to the tail. */
template <typename Element, int kWords>
constexpr int kResidentBytes =
    kDirect<Element> ? int(sizeof(device::DirectSpace<kWords, Element>))
                     : device::kMergeBytes<kWords> + 2 * device::kTileBytes;
template <typename Element, int kWords>
constexpr int kTailBytes =
    kDirect<Element> ? int(sizeof(TailSpace<kWords>)) : kResidentBytes<Element, kWords>;

/** Registers of a thread that attends to the tail: few, so that many blocks wait for memory. */
template <typename Element, int kWords>
constexpr int kTailRegisters = !kDirect<Element> ? kRegistersBesideScore<kWords>
                               : kWords == 16    ? 192
                               : kWords == 8     ? 96
                                                 : 64;

/** Row i of the resident ones: before the zone, then after it. */
template <typename Element>
struct ResidentRows {
  using Reader = device::RowReader<Element>;
  static constexpr bool kCounted = false;
  static constexpr device::RowsLess kLess = device::RowsLess::kNothing;

  const HeadContext& context;
  int before, gap;

  __device__ __forceinline__ const char* operator()(int i) const {
    return row_at(context, i < before ? i : i + gap);
  }
  __device__ __forceinline__ float noted(int, int, float logit) const { return logit; }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

/** Copies of rows of the tail, of 32-bit elements. */
template <typename Element>
struct TailRows {
  using Reader = device::NarrowReader<Element>;
  static constexpr bool kCounted = false;
  static constexpr device::RowsLess kLess = device::RowsLess::kCommon;

  const HeadContext& context;

  __device__ __forceinline__ const char* operator()(int i) const { return tail_copy(context, i); }
  __device__ __forceinline__ device::CommonRows common() const { return tail_common(context); }
  /** Logits are stored, and rows whose logit is not finite do not count. */
  __device__ __forceinline__ float noted(int i, int head, float logit) const {
    const float counts = device::finite(logit) ? logit : -device::infinity();
    const int group = context.shape.group;
    if (head < group) context.scratch.tail_logits[i * group + head] = counts;
    return counts;
  }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

template <typename Element, int kWords, bool kMany>
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
          shape, blocks, slots, int(room + kResidentBytes<Element, kWords> - slots), barriers,
          {count}, new_row, rows);
      attention.run(block.queries(), block.call.q.stride_j,
                    device::PartsInScratch{out, shape.group, shape.value_dim}, merge);
    }
  }

  /** To resident rows. */
  __device__ __forceinline__ void attend() const {
    const HeadContext& context = block.context;
    // Without a search the zone is resident like the rest.
    const int gap = block.searches() ? context.zone.end - context.zone.begin : 0;
    const int count = context.total - gap;
    const bool fresh =
        block.call.k.data != nullptr && (gap == 0 || context.zone.end < context.total);
    const device::NewRow<Element> new_row{fresh ? block.at(block.call.k, context.head) : nullptr,
                                          fresh ? block.at(block.call.v, context.head) : nullptr,
                                          count - 1};
    store_new_row();
    attend_to(ResidentRows<Element>{context, context.zone.begin, gap}, context.shape, count,
              new_row, context.scratch.resident);
  }

  /** To rows of the tail. */
  __device__ __forceinline__ void attend_tail() const {
    const HeadContext& context = block.context;
    if (!block.searches() || context.tail_copies == nullptr) return;
    const Tail tail = tail_of(block.call, context);
    if (tail.count == 0) return;
    if constexpr (kDirect<Element>) {
      using Attention = TailAttention<kWords, Element>;
      const Attention attention(
          context, blocks, *reinterpret_cast<typename Attention::Space*>(room), int(tail.count));
      attention.run(block.queries(), block.call.q.stride_j, context.scratch.sampled);
    } else {
      device::AttendShape shape = context.shape;
      take_format(block.call.shape.tail_rows(), shape);
      attend_to(TailRows<Element>{context}, shape, int(tail.count), {nullptr, nullptr, 0},
                context.scratch.sampled);
    }
  }
};

/** A block with so many parts gives each to a warp. */
constexpr int kManyParts = device::kDirectWarps;
/** Not where rows come through shared memory, nor of 256 dimensions: too many for a warp. */
template <typename Element, int kWords>
constexpr bool kTakesMany = kDirect<Element> && kWords < 8;

/** Of both kernels, of which a launch has all first blocks of heads first: they start beside score.
 */
template <typename Element, int kWords, bool kMany, bool kTail>
__device__ __forceinline__ void attend_beside_score(const ResidentParams& params, char* room) {
  __shared__ HeadContext context;
  __shared__ uint64_t barriers[device::kMostSlots];
  const uint32_t rank = params.by_heads(int(blockIdx.x));
  const uint32_t index = blockIdx.x - rank * uint32_t(params.call.heads);
  device::let_successor_start();
  if (find_context<Element>(params, index, context)) {
    __syncthreads();
    const HeadBlock<Element, kWords> block{params.call, context};
    const AttendResident<Element, kWords, kMany> attend{
        block, {params.blocks_per_head, int(rank)}, room, barriers};
    if constexpr (kTail) {
      attend.attend_tail();
    } else {
      // Else attend_dense has done it.
      if (!params.call.dense_apart || block.searches()) attend.attend();
      if (params.sets_flags && block.searches()) {
        ReadyFlags{context.scratch.flags}.set(ReadyFlags::kAttended + int(rank), params.token);
      }
    }
  }
  // One that ends after the kernel before is enough: until then this one has not ended.
  if (blockIdx.x == 0) device::wait_for_predecessor();
}

template <typename Element, int kWords, bool kMany>
__global__ void __maxnreg__(kRegistersBesideScore<kWords>)
    attend_resident_kernel(const __grid_constant__ ResidentParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  attend_beside_score<Element, kWords, kMany, false>(params, reinterpret_cast<char*>(shared));
}

template <typename Element, int kWords>
__global__ void __maxnreg__((kTailRegisters<Element, kWords>))
    attend_tail_kernel(const __grid_constant__ ResidentParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  attend_beside_score<Element, kWords, false, true>(params, reinterpret_cast<char*>(shared));
}

}  // namespace pariskv::cuda
