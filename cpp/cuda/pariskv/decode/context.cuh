/** What a block of the decode kernels works on: a head, and scratch (context_impl.cuh). */
#pragma once

#include "device/attend_shape.cuh"
#include "device/partition.cuh"
#include "device/signal.cuh"
#include "device/warp.cuh"
#include "pariskv/decode/params.h"
#include "pariskv/decode/query.cuh"
#include "pariskv/decode/zone.cuh"

namespace pariskv::cuda {

/** Registers of a thread: two blocks of score leave room for 256 threads with 96. With 256
 * dimensions they are not enough, and such blocks come later. */
template <int kWords>
constexpr int kRegistersBesideScore = kWords == 16  ? 240
                                      : kWords == 8 ? 128
                                                    : 96;

/** Read from device memory once, then from shared memory where needed. */
struct HeadContext {
  int row, head;  // of the batch; kv head
  void* const* rows;
  const char* tail_copies;  // of rows of the tail; null: these are where all rows are
  int total;
  int searched;  // candidates wanted; 0: everything is resident
  device::Zone zone;
  device::AttendShape shape;
  const float* stretch;   // (key_dim) of queries, see Balance; null: keys are encoded whole
  const int16_t* centre;  // (key_dim) of keys, in steps of
  const float* centre_step;
  HeadScratch scratch;
  int64_t candidate_capacity;
};

/** A block at work for one head: what all kernels share. */
template <typename Element, int kWords>
struct HeadBlock {
  const DecodeCall& call;
  const HeadContext& context;

  __device__ __forceinline__ int searchers() const { return int(call.searchers); }
  __device__ __forceinline__ bool mean() const { return call.group_rule == GroupRule::kMeanQuery; }
  __device__ __forceinline__ bool searches() const { return context.searched > 0; }

  __device__ __forceinline__ Element* at(const Rows& tensor, int64_t j) const {
    return reinterpret_cast<Element*>(tensor.data) + context.row * tensor.stride_i +
           j * tensor.stride_j;
  }
  /** Queries of this head. */
  __device__ __forceinline__ const Element* queries() const {
    return at(call.q, int64_t(context.head) * context.shape.group);
  }
  /** The sink biases of this head's queries from `member` on; null: none. */
  __device__ __forceinline__ const float* biases(int member) const {
    if (call.logits.sink_bias == nullptr) return nullptr;
    return call.logits.sink_bias + int64_t(context.head) * context.shape.group + member;
  }
  /** The rows of q that searchers stand for. */
  __device__ __forceinline__ auto rows_of_searchers() const {
    return rows_of_head(call, context.row, context.head);
  }

  /** A query that is spread over a warp takes on the balance of the head's channels. */
  __device__ __forceinline__ void stretch(float (&x)[kWords]) const {
    if (context.stretch == nullptr) return;
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      const int d = 32 * r + device::lane_id();
      if (d < context.shape.key_dim) x[r] = __fmul_rn(x[r], context.stretch[d]);
    }
  }

  /** rows_of_searchers, when no more is known than what head it is. */
  static __device__ __forceinline__ auto rows_of_head(const DecodeCall& call, int row, int head) {
    return [&call, row, head](int searcher) {
      const int group = int(call.shape.group);
      const bool mean = call.group_rule == GroupRule::kMeanQuery;
      const auto* first = reinterpret_cast<const Element*>(call.q.data) + row * call.q.stride_i +
                          (int64_t(head) * group + searcher) * call.q.stride_j;
      return device::QueryRows<Element>{first, call.q.stride_j, mean ? group : 1, mean,
                                        int(call.shape.rows.key_dim)};
    };
  }
};

/**
 * A block's way from its index to its head: false when the slot is idle. All threads; to be
 * followed by a barrier.
 * @param also  also(view, head), by one thread
 * @param look  look(slot, head), by one warp
 */
template <typename Element, typename Also, typename Look>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also, Look look);
template <typename Element, typename Also>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context, Also also);
template <typename Element>
__device__ __forceinline__ bool find_context(const StepParams& step, uint32_t index,
                                             HeadContext& context);

}  // namespace pariskv::cuda
