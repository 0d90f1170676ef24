/**
 * The last kernel of a decode: what each candidate is worth, the best rows, attention to them, the
 * output. A cluster of blocks per head.
 */
#pragma once

#include "decode_space.cuh"
#include "device/parts.cuh"
#include "device/row_cache.cuh"
#include "device/topk.cuh"

namespace pariskv::cuda {

static_assert(kCacheWays == device::kWays);

/** Selected rows of a block that are noted in shared memory. */
constexpr int kNoted = 1024;

template <int kWords>
struct TakeSpace {
  HeadContext context;
  device::RowCache cache;
  device::TopKSpace top_k;
  device::SelectSpace select;
  uint64_t rows[device::kMostSlots];
  float all[device::kHeadsPerPass];  // log-sum-exp of every head
  int noted[kNoted];                 // candidates of this block that are selected
};

/** How many keys of this block pass, once they have been compacted. */
__device__ __forceinline__ int passed(const device::SelectSpace& space) {
  const int warp = device::lane_id();
  const int above = __reduce_add_sync(~0u, warp < device::kWarps ? space.above[warp] : 0);
  const int equal = __reduce_add_sync(~0u, warp < device::kWarps ? space.equal[warp] : 0);
  return above + min(equal, space.cut.ties);
}

/** What a head's row cache has. While a step is explained there is none: it leaves no trace. */
template <typename Element>
__device__ __forceinline__ device::RowCache row_cache_of(const DecodeCall& call, int row,
                                                         int head) {
  const SequenceView& view = call.lanes[row].layers[call.layer];
  const ModelShape& shape = call.shape;
  if (view.row_cache == nullptr || call.explains) return {};
  const int64_t slots = shape.cached_rows, first = head * slots;
  const int64_t row_bytes = 2 * shape.head_dim * int64_t(sizeof(Element));
  const RowCacheLayout layout{shape.kv_heads, slots, row_bytes};
  return {reinterpret_cast<uint64_t*>(view.row_cache) + first,
          reinterpret_cast<uint32_t*>(view.row_cache + layout.stamps()) + first,
          view.row_cache + layout.rows() + first * row_bytes,
          uint32_t(row_bytes),
          int(slots / kCacheWays),
          uint32_t(view.generation),
          uint32_t(view.total)};
}

/** Where the rows lie that were selected. */
struct SelectedRows {
  const uint64_t* addresses;
  __device__ __forceinline__ const char* operator()(int i) const {
    return reinterpret_cast<const char*>(__ldcg(addresses + i));
  }
};

template <typename Element, int kWords>
struct Take {
  const DecodeLaunch& launch;
  TakeSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  device::Cluster cluster;

  using Keep = device::KeepInCache;

  __device__ __forceinline__ char* room() const {
    return reinterpret_cast<char*>(&space) + (sizeof space + 127) / 128 * 128;
  }
  __device__ __forceinline__ int room_bytes() const {
    return launch.shared_bytes - int((sizeof space + 127) / 128 * 128);
  }
  /** Rows that are selected of so many candidates. */
  __device__ __forceinline__ int wanted(int candidates) const {
    return int(min(int64_t(candidates), block.call.top_k));
  }

  /** Leaves worth[i] of candidates [first, first + count). Ends with a barrier. */
  __device__ __forceinline__ void weigh(int first, int count, float* worth) const {
    const HeadScratch& scratch = block.context.scratch;
    const int group = block.context.shape.group;
    const auto leave = [&](int i, float one) {
      worth[i] = one;
      if (launch.call.explains) scratch.worth[first + i] = one;
    };
    if (block.mean()) {
      for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
        leave(i, __ldcg(scratch.estimates + first + i));
      }
      __syncthreads();
      return;
    }
    const int64_t part = 2 + block.context.shape.head_dim, stride = scratch.candidate_capacity;
    const float inverse = __frcp_rn(float(group));
#pragma unroll 1
    for (int from = 0; from < group; from += device::kHeadsPerPass) {
      const int heads = min(group - from, device::kHeadsPerPass);
      const float* estimates = scratch.estimates + from * stride + first;
      // Logits of a few heads come while there is other work: at first the sums of all heads.
      constexpr int kAhead = 2, kFew = 4;
      float next[kAhead][kFew];
      const auto load = [&](int begin) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
#pragma unroll
          for (int head = 0; head < kFew; ++head) {
            const int i = begin + k * device::kThreads;
            const bool exists = i < count && head < heads;
            next[k][head] = exists ? __ldcg(estimates + head * stride + i) : 0.0f;
          }
        }
      };
      load(int(threadIdx.x));
      if (from > 0) __syncthreads();
      device::sum_up(scratch.masses + from, group, heads, scratch.resident + from * part,
                     group * part, part, block.biases(from), space.all);
      __syncthreads();
      // A broken query has no say in what the others get.
      const auto share_of = [](float logit, float all) {
        return device::finite(all) ? device::share_of(logit, all) : 0.0f;
      };
      float few[kFew];
#pragma unroll
      for (int head = 0; head < kFew; ++head) {
        few[head] = head < heads ? space.all[head] : device::infinity();
      }
#pragma unroll 1
      for (int begin = int(threadIdx.x); begin < count; begin += kAhead * device::kThreads) {
        float shares[kAhead] = {};
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
#pragma unroll
          for (int head = 0; head < kFew; ++head) shares[k] += share_of(next[k][head], few[head]);
        }
        load(begin + kAhead * device::kThreads);
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int i = begin + k * device::kThreads;
          if (i >= count) break;
          float sum = from == 0 ? shares[k] : worth[i] + shares[k];
#pragma unroll 4
          for (int head = kFew; head < heads; ++head) {
            sum += share_of(__ldcg(estimates + head * stride + i), space.all[head]);
          }
          if (from + heads < group) {
            worth[i] = sum;
          } else {
            leave(i, sum * inverse);
          }
        }
      }
    }
    __syncthreads();
  }

  /** Lists a selected row: where it lies, and whether the cache is to have it. */
  __device__ __forceinline__ void list(int index, int position) const {
    const device::RowCache& cache = space.cache;
    const device::RowCache::Tags tags = cache.tags_at(position);
    const char* home = block.row_at(position);
    const int slot = cache.find(tags, position);
    block.context.scratch.addresses[index] =
        reinterpret_cast<uint64_t>(slot < 0 ? home : cache.row(slot));
    if (!cache.exists()) return;
    if (slot >= 0) cache.stamp(slot);
    // The last token's row is written anew when a recorded step is replayed.
    const int fresh = position + 1 < block.context.total ? position : Keep::kUnwanted;
    block.context.scratch.fresh[index] = slot < 0 ? fresh : Keep::kFound;
  }

  /** Leaves the list of selected rows in scratch. Ends with a barrier of the cluster. */
  __device__ __forceinline__ void select(int candidates) const {
    const HeadScratch& scratch = block.context.scratch;
    const int first = device::part_begin(candidates, cluster.first_part());
    const int count = device::part_begin(candidates, cluster.end_part()) - first;
    // In shared memory where it fits.
    float* worth =
        4 * count <= room_bytes() ? reinterpret_cast<float*>(room()) : scratch.worth + first;
    weigh(first, count, worth);
    const auto key_of = [&](int i) { return device::sortable(worth[i]); };
    device::Cut cut{0, count, first, candidates};  // all of them
    if (candidates > block.call.top_k) {
      cut = device::find_top_k(cluster, count, int(block.call.top_k), key_of, space.top_k);
    }
    if (threadIdx.x == 0) space.select.cut = cut;
    __syncthreads();
    const int zone_begin = block.context.zone.begin;
    device::compact_keys(count, key_of, space.select, [&](int index, int i) {
      scratch.selected[index] = first + i;
      if (index - cut.offset < kNoted) space.noted[index - cut.offset] = first + i;
    });
    __syncthreads();
    const int selected = passed(space.select);
    for (int i = int(threadIdx.x); i < selected; i += device::kThreads) {
      const int index = cut.offset + i;
      const int candidate = i < kNoted ? space.noted[i] : __ldcg(scratch.selected + index);
      list(index, zone_begin + __ldcg(scratch.candidates + candidate));
    }
    if (cluster.rank == 0 && threadIdx.x == 0) *scratch.selected_count = wanted(candidates);
    device::before_copies();
    cluster.sync();
  }

  /** Attention to the selected rows. */
  __device__ __forceinline__ void attend(int count) const {
    auto* merge = reinterpret_cast<float*>(room());
    char* slots = room() + device::kMergeBytes<kWords>;
    const HeadScratch& scratch = block.context.scratch;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    device::RowAttention<kWords, Element, SelectedRows, Keep> attention(
        block.context.shape, cluster, slots, int(room() + room_bytes() - slots), space.rows, count,
        {nullptr, nullptr, 0}, {scratch.addresses},
        {space.cache, scratch.fresh, counters == nullptr ? nullptr : counters + 2});
    attention.run(block.queries(), block.call.q.stride_j, scratch.fetched, merge);
  }

  /** Parts added up, outputs written. */
  __device__ __forceinline__ void finish() const {
    const device::AttendShape shape = block.context.shape;
    const HeadScratch& scratch = block.context.scratch;
    const int chunks = (shape.head_dim + 31) / 32;
    const int part = 2 + shape.head_dim;
    for (int task = cluster.rank + cluster.size * device::warp_id(); task < shape.group * chunks;
         task += cluster.size * device::kWarps) {
      const int member = task / chunks, begin = task % chunks * 32;
      const int d = begin + device::lane_id();
      const int64_t query_head = int64_t(block.context.head) * shape.group + member;
      const device::Merged merged = device::merge_parts(
          scratch.resident + member * part,
          block.searches() ? scratch.fetched + member * part : nullptr, shape, begin);
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
    if (cluster.rank != 0 || threadIdx.x != 0 || block.call.counters == nullptr) return;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    atomicAdd(counters, static_cast<unsigned long long>(candidates));
    atomicAdd(counters + 1, static_cast<unsigned long long>(wanted(candidates)));
  }

  __device__ __forceinline__ void run() const {
    if (block.searches()) {
      if (cluster.rank == 0 && int(threadIdx.x) < device::kMostScans) {
        block.context.scratch.scanned[threadIdx.x] = 0;  // so that a graph can be replayed
      }
      const int candidates = __ldcg(block.context.scratch.candidate_count);
      select(candidates);
      attend(wanted(candidates));
      count(candidates);
      cluster.sync();
    }
    finish();
    device::RowStores::wait_written();
  }
};

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 1)
    take_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<TakeSpace<kWords>*>(shared);
  const uint32_t size = uint32_t(launch.team), heads = uint32_t(launch.call.shape.kv_heads);
  if (!find_context<Element>(launch.call, blockIdx.x / size, space.context)) {
    return device::wait_for_predecessor();
  }
  if (threadIdx.x == 64) {
    space.cache = row_cache_of<Element>(launch.call, int(blockIdx.x / size / heads),
                                        int(blockIdx.x / size % heads));
  }
  device::init_row_barriers(space.rows);
  __syncthreads();
  space.cache.prefetch(int(blockIdx.x % size), int(size));
  const Take<Element, kWords> take{
      launch, space, {launch.call, space.context}, {int(size), int(blockIdx.x % size)}};
  device::open_top_k(take.cluster, space.top_k);  // while there is nothing else to do
  device::wait_for_predecessor();
  take.run();
}

}  // namespace pariskv::cuda
