/**
 * attend_pages: the exact best pages of each kv head, and attention to their live rows, which come
 * over the bus or from the row cache. A cluster of blocks per head:
 *
 * | step | of | done by |
 * | --- | --- | --- |
 * | scores of all pages are there | score_pages | the end of that kernel |
 * | the exact best pages | the cluster | find.cuh |
 * | where their rows lie, which the row cache has | the block | rows.cuh, device/row_cache.cuh |
 * | attention to them, a part at a time | the block | device/attend.cuh |
 */
#pragma once

#include "device/attend.cuh"
#include "prkv/decode/attend/find.cuh"
#include "prkv/decode/attend/rows.cuh"

namespace pariskv::cuda {

struct AttendPagesSpace {
  PageContext context;
  int wanted;  // pages
  FindSpace find;
  PageRowSpace rows;
  uint64_t slots[device::kMostSlots];
};

template <typename Element, int kWords>
struct AttendPages {
  const PageAttendParams& params;
  AttendPagesSpace& space;
  device::Cluster cluster;

  static constexpr int kSpaceBytes = int((sizeof(AttendPagesSpace) + 127) / 128 * 128);

  __device__ __forceinline__ char* room() const {
    return reinterpret_cast<char*>(&space) + kSpaceBytes;
  }
  __device__ __forceinline__ int room_bytes() const { return params.shared_bytes - kSpaceBytes; }

  __device__ __forceinline__ void run() const {
    const PageContext& context = space.context;
    const PageScratch scratch = page_scratch(params.scratch, context.scratch, context.capacity);
    const FindPages find{params,          context,    scratch,
                         cluster,         space.find, reinterpret_cast<uint32_t*>(room()),
                         room_bytes() / 4};
    const int found = find.run(space.wanted);
    if (found == 0 || params.call.explains) return;
    PageRowList list(params, context, scratch, cluster, space.rows);
    list.list(found);
    auto* counters = reinterpret_cast<unsigned long long*>(params.call.counters);
    if (cluster.rank == 0 && threadIdx.x == 0) {
      atomicAdd(counters + 1, static_cast<unsigned long long>(list.parts().rows));
    }
    auto* merge = reinterpret_cast<float*>(room());
    char* slots = room() + device::kMergeBytes<kWords>;
    device::RowAttention<kWords, Element, PageRows<Element>, PageParts, device::CacheRows>
    attention(context.shape, cluster, slots, int(room() + room_bytes() - slots), space.slots,
              list.parts(), {nullptr, nullptr, 0}, PageRows<Element>{list.rows()},
              {space.rows.cache, cluster, space.find.top_k.mail, list.rows(), list.stamped(),
               counters + 2});
    const Rows& q = params.call.q;
    const auto* query = reinterpret_cast<const Element*>(q.data) + context.row * q.stride_i +
                        int64_t(context.head) * context.shape.group * q.stride_j;
    const device::PartsInScratch parts{scratch.fetched, context.shape.group,
                                       context.shape.value_dim};
    attention.run(query, q.stride_j, parts, merge);
    device::CacheRows::finish();
  }
};

/** Pages that a step is to find: of the budget, what is not for kept rows. */
__device__ __forceinline__ int pages_wanted(const PageDecodeCall& call, const SequenceView& view) {
  if (view.dense()) return 0;
  if (view[Part::kKept] == nullptr) return int(call.rules.split(0).pages);
  const AmendedLayout layout = amended_of(call.shape, view.kept_capacity);
  return int(device::AmendedHead{view[Part::kKept], layout, 0}.split()->pages);
}

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 1)
    attend_pages(const __grid_constant__ PageAttendParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int exists;
  auto& space = *reinterpret_cast<AttendPagesSpace*>(shared);
  const int size = params.cluster_size, rank = int(blockIdx.x) & (size - 1);  // a power of two
  const int index = int(blockIdx.x) >> device::log2_of_power(size);
  device::let_successor_start();
  if (threadIdx.x == 0) {
    exists = find_pages_context(params, index, space.context, [&](const SequenceView& view) {
      space.wanted = pages_wanted(params.call, view);
      if (params.call.explains) {
        space.rows.cache = {};
      } else {
        space.rows.cache = head_row_cache(params.call.shape, view, space.context.head);
      }
    });
  }
  device::init_row_barriers(space.slots);
  __syncthreads();
  if (exists == 0) return device::wait_for_predecessor();
  const AttendPages<Element, kWords> attend{params, space, {size, rank}};
  space.rows.cache.prefetch(rank, size);
  device::open_top_k(attend.cluster, space.find.top_k);  // while there is nothing else to do
  device::wait_for_predecessor();
  attend.run();
}

}  // namespace pariskv::cuda
