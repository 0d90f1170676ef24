/**
 * merge_kept: the parts of a step put together, outputs and log-sum-exps written; and the queries
 * of new tokens, to where they are remembered. A block for each query head, in which a warp has 32
 * dimensions.
 */
#pragma once

#include "device/partition.cuh"
#include "device/signal.cuh"
#include "device/softmax.cuh"
#include "hardkv/decode/params.h"
#include "hardkv/remember/query.cuh"

namespace pariskv::cuda {

constexpr int kMostMergeThreads = int(kMaxHeadDim);

template <typename Element>
struct MergeKept {
  const KeptStepParams& params;
  const Lane& lane;
  const SequenceView* layers;
  int row, query_head, chunk;

  __device__ __forceinline__ Element* at(const Rows& tensor) const {
    return reinterpret_cast<Element*>(tensor.data) + row * tensor.stride_i +
           query_head * tensor.stride_j;
  }

  __device__ __forceinline__ void remember() const {
    if (params.call.k.data == nullptr || chunk != 0) return;
    const SequenceView& view = layers[params.call.layer];
    device::remember_query(at(params.call.q), params.call.logits.scale, params.most_steps,
                           params.call.shape.recent_queries(), view.recent, view.total - 1,
                           query_head);
  }

  __device__ __forceinline__ void merge() const {
    const KeptDecodeCall& call = params.call;
    const int group = int(call.shape.group), dim = int(call.shape.rows.value_dim);
    const int head = query_head / group, lane_id = device::lane_id();
    const int d = 32 * chunk + lane_id;
    const float* parts =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(lane.scratch.resident) +
                                       head * lane.head_bytes) +
        (query_head - head * group) * (2 + dim);
    const int step = group * (2 + dim);
    float maximum = -device::infinity(), sum = 0, values[device::kParts] = {};
    if (lane_id < device::kParts) {
      maximum = __ldcg(parts + lane_id * step);
      sum = __ldcg(parts + lane_id * step + 1);
    }
#pragma unroll
    for (int part = 0; part < device::kParts; ++part) {
      if (d < dim) values[part] = __ldcg(parts + part * step + 2 + d);
    }
    const float top = device::warp_max(maximum);
    const float factor = maximum == -device::infinity() ? 0.0f : device::exp_of(maximum - top);
    sum = device::warp_sum(sum * factor);
    float weighted = 0;
#pragma unroll
    for (int part = 0; part < device::kParts; ++part) {
      weighted = __fmaf_rn(__shfl_sync(~0u, factor, part), values[part], weighted);
    }
    const float rows = device::log_of_sum(top, sum);
    float lse = rows;
    if (call.logits.sink_bias != nullptr) {
      lse = device::log_add(lse, call.logits.sink_bias[query_head]);
    }
    // The share of all attention that e^top stands for; nothing seen leaves zeros.
    const bool none = lse == -device::infinity() || top == -device::infinity();
    const float share = none ? 0.0f : __fdiv_rn(expf(rows - lse), sum);
    if (call.out.data != nullptr && d < dim) {
      at(call.out)[d] = device::from_float<Element>(weighted * share);
    }
    if (call.lse != nullptr && d == 0) call.lse[row * call.lse_stride + query_head] = lse;
  }
};

template <typename Element>
__global__ void __launch_bounds__(kMostMergeThreads)
    merge_kept(const __grid_constant__ KeptStepParams params) {
  const int query = int(blockIdx.x), row = int(params.by_query_heads(query));
  const Lane& lane = params.call.lanes[row];
  const SequenceView* layers = lane.layers;
  const int query_head = query - row * int(params.call.shape.query_heads());
  const MergeKept<Element> merge{params, lane, layers, row, query_head, device::warp_id()};
  // The kernel before has nothing to do with this. An output may lie where its query lies.
  if (layers != nullptr) merge.remember();
  __syncthreads();
  device::wait_for_predecessor();
  if (layers != nullptr) merge.merge();
}

}  // namespace pariskv::cuda
