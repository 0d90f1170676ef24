/** One block of the decode kernel: where its things are, and its share of the work. */
#pragma once

#include "decode_space.cuh"

namespace pariskv::cuda {

/** One block at work. What it keeps in registers it needs everywhere; the rest is in `space`. */
template <typename Element, int kWords>
struct DecodeBlock {
  const DecodeLaunch& launch;
  const DecodeCall& call;
  DecodeSpace<kWords>& space;
  const HeadContext& context;
  device::Cluster cluster;

  static constexpr int kSearchers = device::kQueries<kWords>;  // prepared at a time

  __device__ __forceinline__ bool runs(DecodeStep step) const {
    return call.first_step <= step && step <= call.last_step;
  }
  __device__ __forceinline__ int searchers() const { return int(call.searchers); }
  __device__ __forceinline__ bool votes() const { return call.scorer == Scorer::kVotes; }
  __device__ __forceinline__ bool searches() const { return context.searched > 0; }

  // Shared memory after the space: scores nearby, units of keys, tiles of rows.
  __device__ __forceinline__ uint8_t* near() const {
    return reinterpret_cast<uint8_t*>(&space) + (sizeof space + 127) / 128 * 128;
  }
  __device__ __forceinline__ uint8_t* units() const { return near() + launch.plan.near_bytes; }
  __device__ __forceinline__ int unit_bytes() const {
    return device::kWarps * launch.plan.stages * device::kUnitBytes<kWords>;
  }
  __device__ __forceinline__ char* tiles() const {
    return reinterpret_cast<char*>(units() + unit_bytes());
  }
  __device__ __forceinline__ uint32_t* histogram() const {
    return reinterpret_cast<uint32_t*>(space.top_k.bins) + 256 * device::warp_id();
  }

  __device__ __forceinline__ Element* at(const Rows& tensor, int64_t j) const {
    return reinterpret_cast<Element*>(tensor.data) + context.row * tensor.stride_i +
           j * tensor.stride_j;
  }
  /** Where a position's row lies, in device or host memory. */
  __device__ __forceinline__ char* row_at(int position) const {
    const uint32_t tokens = uint32_t(call.shape.segment_tokens);
    const uint32_t segment = uint32_t(position) / tokens;
    const int64_t slot = uint32_t(position) - segment * tokens;
    return static_cast<char*>(context.rows[segment]) +
           (int64_t(context.head) * tokens + slot) * context.shape.row_bytes;
  }

  /** Units [first, end). */
  struct Share {
    int first, end;
  };
  __device__ __forceinline__ Share block_share() const {
    const int all = searches() ? context.zone.template units<kWords>() : 0;
    return {int(int64_t(all) * cluster.rank / cluster.size),
            int(int64_t(all) * (cluster.rank + 1) / cluster.size)};
  }
  __device__ __forceinline__ Share warp_share() const {
    const Share block = block_share();
    const int count = block.end - block.first, warp = device::warp_id();
    return {block.first + count * warp / device::kWarps,
            block.first + count * (warp + 1) / device::kWarps};
  }

  /** Rows that are selected of so many candidates. */
  __device__ __forceinline__ int wanted(int candidates) const {
    return int(min(int64_t(candidates), call.top_k));
  }

  // Ahead of everything: barriers, and what shared memory holds from the start.

  __device__ __forceinline__ void set_up() const {
    const int thread = int(threadIdx.x);
    if (thread < device::kMostSlots) {
      device::init_barrier(&space.rows[thread], device::kWarps * device::RowCopies::kArrivals);
    }
    for (int i = thread; i < device::kBins; i += device::kThreads) space.top_k.bins[i] = 0;
    if (thread < 16) {
      const float centre = call.codec.centres[thread % 8];
      space.centres[thread] = thread < 8 ? -centre : centre;
    }
    device::before_copies();
  }

  __device__ __forceinline__ device::Ring<kWords> make_ring() const {
    const int warp = device::warp_id();
    device::Ring<kWords> ring;
    ring.stages = units() + warp * launch.plan.stages * device::kUnitBytes<kWords>;
    ring.barriers = space.ring[warp];
    ring.count = launch.plan.stages;
    ring.init_barriers();
    return ring;
  }
};

}  // namespace pariskv::cuda
