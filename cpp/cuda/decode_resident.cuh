/**
 * Attention to a head's resident rows, which needs nothing of a search: a few blocks per kv head do
 * it while the scan is at work, and make room for those that estimate.
 */
#pragma once

#include "decode_space.cuh"
#include "device/attend_direct.cuh"

namespace pariskv::cuda {

/** Whether rows go straight to the tensor cores. */
template <typename Element>
constexpr bool kDirect = sizeof(Element) == 2;
/**
 * Small blocks, where they can be: one fits beside two that estimate, two beside two that scan
 * (with up to 128 dimensions).
 */
template <typename Element>
constexpr int kResidentThreads = kDirect<Element> ? device::kDirectThreads : device::kThreads;

/** Shared memory that attention to resident rows needs, besides a row where they go straight. */
template <typename Element, int kWords>
constexpr int kResidentBytes =
    kDirect<Element> ? int(sizeof(device::DirectSpace<kWords, Element>))
                     : device::kMergeBytes<kWords> + 2 * device::kTileBytes;

/** Row i of those that are resident: before the zone, then after it. */
template <typename Element, int kWords>
struct ResidentRows {
  const HeadBlock<Element, kWords>& block;
  int before, gap;
  __device__ __forceinline__ const char* operator()(int i) const {
    return block.row_at(i < before ? i : i + gap);
  }
  __device__ __forceinline__ bool is_placed(int) const { return false; }
  __device__ __forceinline__ const char* placed(int) const { return nullptr; }
  __device__ __forceinline__ void await_placed() const {}
};

template <typename Element, int kWords, bool kMany>
struct Resident {
  const HeadBlock<Element, kWords>& block;
  device::Cluster team;  // the blocks that share the parts of the rows; they never meet
  char* room;            // kResidentBytes
  uint64_t (&barriers)[device::kMostSlots];

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row() const {
    if (block.call.k.data == nullptr || team.rank != team.size - 1) return;
    const int key = block.context.shape.key_dim, all = key + block.context.shape.value_dim;
    auto* to = reinterpret_cast<Element*>(block.row_at(block.context.total - 1));
    for (int d = int(threadIdx.x); d < all; d += kResidentThreads<Element>) {
      to[d] = d < key ? block.at(block.call.k, block.context.head)[d]
                      : block.at(block.call.v, block.context.head)[d - key];
    }
  }

  /** Attention to this block's share of the rows. */
  __device__ __forceinline__ void attend() const {
    // Without a search the zone is resident like the rest.
    const device::Zone& zone = block.context.zone;
    const int gap = block.searches() ? zone.end - zone.begin : 0;
    const int count = block.context.total - gap;
    const bool fresh = block.call.k.data != nullptr && (gap == 0 || zone.end < block.context.total);
    const device::NewRow<Element> new_row{
        fresh ? block.at(block.call.k, block.context.head) : nullptr,
        fresh ? block.at(block.call.v, block.context.head) : nullptr, count - 1};
    using Rows = ResidentRows<Element, kWords>;
    const Rows rows{block, zone.begin, gap};
    float* out = block.context.scratch.resident;
    store_new_row();
    if constexpr (kDirect<Element>) {
      device::DirectAttention<kWords, Element, Rows> attention(
          block.context.shape, team, *reinterpret_cast<device::DirectSpace<kWords, Element>*>(room),
          count, new_row, rows);
      attention.template run<kMany>(block.queries(), block.call.q.stride_j, out);
    } else {
      device::init_row_barriers(barriers);
      __syncthreads();
      auto* merge = reinterpret_cast<float*>(room);
      char* slots = room + device::kMergeBytes<kWords>;
      device::RowAttention<kWords, Element, Rows> attention(
          block.context.shape, team, slots, int(room + kResidentBytes<Element, kWords> - slots),
          barriers, {count}, new_row, rows);
      const device::AttendShape& shape = block.context.shape;
      attention.run(block.queries(), block.call.q.stride_j,
                    device::PartsInScratch{out, shape.group, shape.value_dim}, merge);
    }
  }
};

/** A block with so many parts gives each to a warp. */
constexpr int kManyParts = device::kDirectWarps;
/** Not where rows come through shared memory, nor of 256 dimensions: too many for a warp. */
template <typename Element, int kWords>
constexpr bool kTakesMany = kDirect<Element> && kWords < 8;

template <typename Element, int kWords, bool kMany>
__global__ void __maxnreg__(kRegistersBesideScan<kWords>)
    resident_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ HeadContext context;
  __shared__ uint64_t barriers[device::kMostSlots];
  // The first blocks of all heads come first: they start beside the scan.
  const uint32_t rank = launch.by_blocks(int(blockIdx.x));
  const uint32_t index = blockIdx.x - rank * uint32_t(launch.call.heads);
  device::let_successor_start();
  if (find_context<Element>(launch, index, context)) {
    __syncthreads();
    const HeadBlock<Element, kWords> block{launch.call, context};
    Resident<Element, kWords, kMany>{
        block, {launch.resident_blocks, int(rank)}, reinterpret_cast<char*>(shared), barriers}
        .attend();
  }
  // One that ends after the scan is enough: until then this kernel has not ended.
  if (blockIdx.x == 0) device::wait_for_predecessor();
}

}  // namespace pariskv::cuda
