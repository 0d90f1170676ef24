/**
 * The second kernel of a decode. Some blocks attend to a part of a head's resident rows, which
 * needs nothing of the scan; the others find a slice of its candidates and estimate their logits.
 */
#pragma once

#include <algorithm>

#include "decode_space.cuh"
#include "device/select.cuh"

namespace pariskv::cuda {

/** Candidates whose places are known at a time; a slice with more takes several turns. */
constexpr int kListed = 768;

template <int kWords>
struct EstimateSpace {
  HeadContext context;
  float centres[16];
  device::Mass masses[4][device::kWarps];
  int32_t offsets[kListed];  // the first of the slice
  device::KeyPlace places[kListed];
  uint64_t rows[device::kMostSlots];
};

/** Shared memory after the space: counts of scores and then codes, or tiles of rows. */
template <int kWords>
constexpr int kEstimateBytes =
    std::max({int(sizeof(device::ScoreSpace)), device::kGatherBytes<kWords>,
              device::kMergeBytes<kWords> + 128 + 2 * device::kTileBytes});

/** Row i of those that are resident: before the zone, then after it. */
template <typename Element, int kWords>
struct ResidentRows {
  const HeadBlock<Element, kWords>& block;
  int before, gap;
  __device__ __forceinline__ const char* operator()(int i) const {
    return block.row_at(i < before ? i : i + gap);
  }
};

template <typename Element, int kWords>
struct Estimate {
  const DecodeLaunch& launch;
  EstimateSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  int part;  // of the resident rows, or slice of the candidates

  __device__ __forceinline__ char* room() const {
    return reinterpret_cast<char*>(&space) + (sizeof space + 127) / 128 * 128;
  }

  /** The token's own row goes to its place in the store. */
  __device__ __forceinline__ void store_new_row() const {
    if (block.call.k.data == nullptr || part != device::kParts - 1) return;
    const int dim = block.context.shape.head_dim;
    auto* to = reinterpret_cast<Element*>(block.row_at(block.context.total - 1));
    for (int d = int(threadIdx.x); d < 2 * dim; d += device::kThreads) {
      to[d] = d < dim ? block.at(block.call.k, block.context.head)[d]
                      : block.at(block.call.v, block.context.head)[d - dim];
    }
  }

  /** Attention to the part's resident rows. */
  __device__ __forceinline__ void attend() const {
    device::init_row_barriers(space.rows);
    __syncthreads();
    // Without a search the zone is resident like the rest.
    const device::Zone& zone = block.context.zone;
    const int gap = block.searches() ? zone.end - zone.begin : 0;
    const int rows = block.context.total - gap;
    const bool fresh = block.call.k.data != nullptr && (gap == 0 || zone.end < block.context.total);
    const device::Cluster team{device::kParts, part};  // a part each
    auto* merge = reinterpret_cast<float*>(room());
    char* slots = room() + (device::kMergeBytes<kWords> + 127) / 128 * 128;
    device::RowAttention<kWords, Element, ResidentRows<Element, kWords>> attention(
        block.context.shape, team, slots, int(room() + kEstimateBytes<kWords> - slots), space.rows,
        rows,
        {fresh ? block.at(block.call.k, block.context.head) : nullptr,
         fresh ? block.at(block.call.v, block.context.head) : nullptr, rows - 1},
        {block, zone.begin, gap});
    store_new_row();
    attention.run(block.queries(), block.call.q.stride_j, block.context.scratch.resident, merge);
  }

  /** The candidates of this part: how many, and the index of the first. Ends with a barrier. */
  __device__ __forceinline__ int2 select() const {
    auto& scores = *reinterpret_cast<device::ScoreSpace*>(room());
    const device::Zone& zone = block.context.zone;
    const int team = launch.team;
    device::find_threshold(block.context.scratch.counts, team, block.context.searched, scores);
    const int count = scores.count;
    const int first = device::slice_begin(count, part), last = device::slice_begin(count, part + 1);
    const int units = zone.template units<kWords>(), shift = zone.begin - zone.origin();
    const auto before = [&](int scan) {  // candidates in the scans before it
      return scores.above[scan] + min(scores.equal[scan], scores.ties);
    };
    int32_t* candidates = block.context.scratch.candidates;
#pragma unroll 1
    for (int scan = 0; scan < team; ++scan) {
      if (before(scan) >= last || before(scan + 1) <= first) continue;
      device::compact_scores(block.context.scratch.scores,
                             scan_begin(units, scan, team) * device::kUnitKeys<kWords>,
                             scan_begin(units, scan + 1, team) * device::kUnitKeys<kWords>, scan,
                             shift, first, last, scores, [&](int index, int offset) {
                               candidates[index] = offset;
                               if (index - first < kListed) space.offsets[index - first] = offset;
                             });
      __syncthreads();
    }
    if (part == 0 && threadIdx.x == 0) *block.context.scratch.candidate_count = count;
    __syncthreads();
    return make_int2(first, last - first);
  }

  /** Looks up where candidates [at, at + count) of the slice are. Ends with a barrier. */
  __device__ __forceinline__ void find_places(int first, int at, int count) const {
    const device::Zone& zone = block.context.zone;
    const int32_t* rest = block.context.scratch.candidates + first + at;
    for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
      const int offset = at == 0 ? space.offsets[i] : __ldcg(rest + i);
      const device::Slot slot = device::slot_of(zone, zone.begin + offset);
      space.places[i] = {slot.block, slot.slot};
    }
    __syncthreads();
  }

  /** Logits of candidates whose places are known, for up to four queries, and their masses. */
  __device__ __forceinline__ void estimate_listed(const device::EstimateQueries<kWords>& queries,
                                                  int count, int heads, float* out,
                                                  device::Mass& mass) const {
    constexpr int kAtOnce = device::kGathered<kWords>;
    constexpr int kHalf = device::kGatherBytes<kWords> / 2;
    const auto bring = [&](int at) {
      if (at < count) {
        device::gather_codes<kWords>(block.context.zone, space.places + at,
                                     min(kAtOnce, count - at), room() + at / kAtOnce % 2 * kHalf);
      }
      device::close_stage();
    };
    bring(0);
#pragma unroll 1
    for (int at = 0; at < count; at += kAtOnce) {
      bring(at + kAtOnce);
      device::await_stage<1>();
      __syncthreads();
      device::estimate<kWords>(queries, room() + at / kAtOnce % 2 * kHalf, space.places + at,
                               min(kAtOnce, count - at), space.centres, block.call.logits.softcap,
                               heads, out + at, block.context.scratch.candidate_capacity, mass);
      __syncthreads();
    }
    device::await_stage<0>();
  }

  /** Logits of candidates [first, first + count) and their masses. */
  __device__ __forceinline__ void estimate(int first, int count) const {
    const HeadScratch& scratch = block.context.scratch;
#pragma unroll 1
    for (int from = 0; from < block.searchers(); from += 4) {
      const int heads = min(block.searchers() - from, 4);
      device::EstimateQueries<kWords> queries;
      queries.load(scratch.rotated + from * 32 * kWords, heads);
      device::Mass mass{-device::infinity(), 0};
      float* out = scratch.estimates + from * scratch.candidate_capacity + first;
#pragma unroll 1
      for (int at = 0; at < count; at += kListed) {
        const int listed = min(kListed, count - at);
        find_places(first, at, listed);
        estimate_listed(queries, listed, heads, out + at, mass);
      }
      const device::Mass of_warp = device::mass_of_warp<kWords>(mass);
      const int mine = device::estimate_head<kWords>();
      if (device::lane_id() < 2 * kWords && mine >= 0) {
        space.masses[mine][device::warp_id()] = of_warp;
      }
      __syncthreads();
      if (int(threadIdx.x) < heads) {
        scratch.masses[part * block.context.shape.group + from + int(threadIdx.x)] =
            device::sum_of(space.masses[threadIdx.x]);
      }
    }
  }
};

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 2)
    estimate_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<EstimateSpace<kWords>*>(shared);
  // Slices first: they are waited for.
  const uint32_t slices = gridDim.x / (device::kParts + device::kSlices) * device::kSlices;
  const bool resident = blockIdx.x >= slices;
  const uint32_t index = resident ? blockIdx.x - slices : blockIdx.x;
  const uint32_t share = resident ? device::kParts : device::kSlices;
  device::let_successor_start();
  // Whoever ends has waited: else the kernel might end before the one that it follows.
  if (!find_context<Element>(launch.call, index / share, space.context)) {
    return device::wait_for_predecessor();
  }
  if (threadIdx.x < 16) {
    const float centre = launch.call.codec.centres[threadIdx.x % 8];
    space.centres[threadIdx.x] = threadIdx.x < 8 ? -centre : centre;
  }
  __syncthreads();
  const Estimate<Element, kWords> estimate{
      launch, space, {launch.call, space.context}, int(index % share)};
  const bool searches = estimate.block.searches();
  if (resident) estimate.attend();
  device::wait_for_predecessor();
  if (resident || !searches) return;
  const int2 mine = estimate.select();
  estimate.estimate(mine.x, mine.y);
}

}  // namespace pariskv::cuda
