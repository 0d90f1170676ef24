/**
 * A whole decode step in one kernel: a cluster of blocks per kv head of a sequence. Blocks cut
 * every stage of the work anew and meet at barriers of the cluster; see DecodeStep for the stages.
 * What a stage leaves for a later one lies in scratch, so that stages can be launched alone.
 */
#pragma once

#include "decode_search.cuh"

namespace pariskv::cuda {

template <typename Element, int kWords>
struct Decoder {
  using Block = DecodeBlock<Element, kWords>;
  const Block& block;

  // Attention over rows.

  /** Row i of those that are resident: before the zone, then after it. */
  struct ResidentRows {
    const Block& block;
    int before, gap;
    __device__ __forceinline__ const char* operator()(int i) const {
      return block.row_at(i < before ? i : i + gap);
    }
  };
  /** Row i of those that were selected. */
  struct SelectedRows {
    const uint64_t* addresses;
    __device__ __forceinline__ const char* operator()(int i) const {
      return reinterpret_cast<const char*>(__ldcg(addresses + i));
    }
  };
  template <typename Address>
  using Attention = device::RowAttention<kWords, Element, Address>;

  __device__ __forceinline__ Attention<ResidentRows> resident_attention() const {
    // Without a search the zone is resident like the rest.
    const int gap = block.searches() ? block.context.zone.end - block.context.zone.begin : 0;
    const bool fresh =
        block.call.k.data != nullptr && (gap == 0 || block.context.zone.end < block.context.total);
    const int rows = block.context.total - gap;
    return {block.context.shape,
            block.cluster,
            block.tiles(),
            block.launch.plan.rows_bytes,
            block.space.rows,
            rows,
            {fresh ? block.at(block.call.k, block.context.head) : nullptr,
             fresh ? block.at(block.call.v, block.context.head) : nullptr, rows - 1},
            {block, block.context.zone.begin, gap}};
  }

  __device__ __forceinline__ Attention<SelectedRows> selected_attention(int count) const {
    char* slots = reinterpret_cast<char*>(block.units()) + device::kMergeBytes<kWords>;
    slots += -reinterpret_cast<uintptr_t>(slots) % 128;
    const int bytes = int(block.tiles() + block.launch.plan.rows_bytes - slots);
    return {block.context.shape,
            block.cluster,
            slots,
            bytes,
            block.space.rows,
            count,
            {nullptr, nullptr, 0},
            {block.context.scratch.addresses}};
  }

  /** `attention` is primed. */
  template <typename Address>
  __device__ __forceinline__ void attend(Attention<Address>& attention, float* out) const {
    auto* merge = reinterpret_cast<float*>(block.units());
    const Element* q =
        block.at(block.call.q, int64_t(block.context.head) * block.context.shape.group);
    for (int begin = 0; begin < block.context.shape.group; begin += device::kHeadsPerPass) {
      if (begin > 0) attention.prime();
      attention.run(q, block.call.q.stride_j, begin, out, merge);
    }
  }

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row() const {
    if (block.call.k.data == nullptr || block.cluster.rank != block.cluster.size - 1) return;
    const int dim = block.context.shape.head_dim;
    auto* to = reinterpret_cast<Element*>(block.row_at(block.context.total - 1));
    for (int d = int(threadIdx.x); d < 2 * dim; d += device::kThreads) {
      to[d] = d < dim ? block.at(block.call.k, block.context.head)[d]
                      : block.at(block.call.v, block.context.head)[d - dim];
    }
  }

  // The end: parts added up, outputs written.

  __device__ __forceinline__ void finish() const {
    const device::AttendShape shape = block.context.shape;
    const int chunks = (shape.head_dim + 31) / 32;
    const int part = 2 + shape.head_dim;
    for (int task = block.cluster.rank + block.cluster.size * device::warp_id();
         task < shape.group * chunks; task += block.cluster.size * device::kWarps) {
      const int member = task / chunks, begin = task % chunks * 32;
      const int d = begin + device::lane_id();
      const int64_t query_head = int64_t(block.context.head) * shape.group + member;
      const device::Merged merged = device::merge_parts(
          block.context.scratch.resident + member * part,
          block.searches() ? block.context.scratch.fetched + member * part : nullptr, shape, begin);
      float lse = device::log_of_sum(merged.maximum, merged.sum);
      if (block.call.logits.sink_bias != nullptr) {
        lse = device::log_add(lse, block.call.logits.sink_bias[query_head]);
      }
      // The share of all attention that e^maximum stands for; nothing seen leaves zeros.
      const bool none = lse == -device::infinity() || merged.maximum == -device::infinity();
      const float share = none ? 0.0f : expf(merged.maximum - lse);
      if (block.call.out.data != nullptr && d < shape.head_dim) {
        block.at(block.call.out, query_head)[d] =
            device::from_float<Element>(merged.weighted * share);
      }
      if (block.call.lse != nullptr && d == 0) {
        block.call.lse[block.context.row * block.call.lse_stride + query_head] = lse;
      }
    }
  }

  __device__ __forceinline__ void count(int candidates) const {
    if (block.cluster.rank != 0 || threadIdx.x != 0 || block.call.counters == nullptr) return;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    atomicAdd(counters, static_cast<unsigned long long>(candidates));
    atomicAdd(counters + 1, static_cast<unsigned long long>(block.wanted(candidates)));
  }

  __device__ __forceinline__ void run() const {
    const DecodeSearch<Element, kWords> search{block};
    const bool searches = block.searches();
    // What has to come from memory sets out first; votes need the place of the rows for a while.
    const bool scores = searches && block.runs(kScore), late = scores && block.votes();
    if (block.runs(kResident) && !late) resident_attention().prime();
    device::Ring<kWords> ring = block.make_ring();
    if (scores) {
      const auto share = block.warp_share();
      ring.prime(block.context.zone, share.first, share.end);
    }
    const bool prepares = block.runs(kPrepare) || block.runs(kScore);
    if (searches && (prepares || block.runs(kRerank))) {
      search.prepare(0);
      if (block.votes() && prepares) search.cast_all_votes();
    }
    if (scores) search.score(ring);
    if (searches && block.runs(kSelect)) search.count_scores();

    // Rows that are resident, while the cluster comes together.
    device::before_copies();
    __syncthreads();
    uint32_t parity = 0;
    if (block.runs(kResident)) {
      auto attention = resident_attention();
      if (late) {
        attention.prime();
      } else {
        attention.take_over();
      }
      store_new_row();
      attend(attention, block.context.scratch.resident);
      parity = attention.parity();
    }

    int candidates = 0;
    if (searches && block.runs(kSelect)) {
      candidates = search.select();
    } else if (searches && (block.runs(kRerank) || block.runs(kFetch))) {
      candidates = __ldcg(block.context.scratch.candidate_count);
    }
    if (searches && block.runs(kRerank)) search.rerank(candidates);
    if (!block.runs(kFetch)) return;
    if (searches) {
      auto attention = selected_attention(block.wanted(candidates));
      attention.set_parity(parity);
      attention.prime();
      attend(attention, block.context.scratch.fetched);
      count(candidates);
    }
    block.cluster.sync();
    finish();
  }
};

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<DecodeSpace<kWords>*>(shared);
  const DecodeCall& call = launch.call;
  const uint32_t heads = uint32_t(call.shape.kv_heads);
  const uint32_t index = blockIdx.x / uint32_t(launch.cluster), row = index / heads;
  const Lane lane = call.lanes[row];
  if (lane.layers == nullptr) return;
  const DecodeBlock<Element, kWords> block{
      launch,
      call,
      space,
      space.context,
      {launch.cluster, int(blockIdx.x % uint32_t(launch.cluster))}};
  if (threadIdx.x == 0) {
    space.context = context_of<Element>(call, lane, lane.layers[call.layer], int(row),
                                        int(index - row * heads));
  }
  block.set_up();
  __syncthreads();
  Decoder<Element, kWords>{block}.run();
}

/** Enqueues the call by the kernel for its dimensions: of 64, 128 or 256. */
void launch_kernel(const DecodeCall& call, const void* const (&kernels)[3], cudaStream_t stream);

template <typename Element>
void launch_decode_as(const DecodeCall& call, cudaStream_t stream) {
  launch_kernel(call,
                {reinterpret_cast<const void*>(decode_kernel<Element, 2>),
                 reinterpret_cast<const void*>(decode_kernel<Element, 4>),
                 reinterpret_cast<const void*>(decode_kernel<Element, 8>)},
                stream);
}

}  // namespace pariskv::cuda
