/** The search of a decode step: from queries to the rows that are worth fetching. */
#pragma once

#include "decode_block.cuh"

namespace pariskv::cuda {

template <typename Element, int kWords>
struct DecodeSearch {
  using Block = DecodeBlock<Element, kWords>;
  const Block& block;

  __device__ __forceinline__ void prepare(int from) const {
    const bool mean = block.call.group_rule == GroupRule::kMeanQuery;
    const int64_t first = int64_t(block.context.head) * block.context.shape.group;
    device::prepare_queries<kWords, Element>(
        block.context.statistics, block.call.codec.negative, from, block.searchers(), block.votes(),
        [&](int searcher) {
          return device::QueryRows<Element>{block.at(block.call.q, first + searcher),
                                            block.call.q.stride_j, block.context.shape.group, mean,
                                            block.context.shape.head_dim};
        },
        block.space.queries);
  }

  /** Vote tables of all searchers, a warp of the cluster per subspace. Ends with a barrier. */
  __device__ __forceinline__ void cast_all_votes() const {
    constexpr int kSubspaces = 4 * kWords;
    const int warp = block.cluster.rank * device::kWarps + device::warp_id();
    const int64_t keys = *block.context.statistics.usable;
    for (int from = 0; from < block.searchers(); from += Block::kSearchers) {
      if (from > 0) {
        __syncthreads();
        prepare(from);
      }
      const int tables = min(block.searchers() - from, Block::kSearchers) * kSubspaces;
      for (int task = warp; task < tables; task += block.cluster.size * device::kWarps) {
        const int slot = task / kSubspaces, subspace = task % kSubspaces;
        uint8_t* table = block.context.scratch.votes + (int64_t(from) * kSubspaces + task) * 256;
        if (block.space.queries.whole[slot]) {
          device::cast_votes(&block.space.queries.rotated[slot][8 * subspace],
                             block.context.statistics.counts + 256 * subspace, keys,
                             block.context.vote_ratio, table);
        } else {
          reinterpret_cast<uint2*>(table)[device::lane_id()] = make_uint2(0, 0);
        }
      }
    }
    block.cluster.sync();
  }

  __device__ __forceinline__ device::ScoreOutput score_output(bool earlier, bool last) const {
    const auto share = block.block_share();
    const bool fits =
        (share.end - share.first) * device::kUnitKeys<kWords> <= block.launch.plan.near_bytes;
    return {block.context.scratch.scores,
            fits ? block.near() : nullptr,
            share.first,
            block.histogram(),
            earlier,
            last};
  }

  /** The ring is primed. */
  __device__ __forceinline__ void score(device::Ring<kWords>& ring) const {
    const int step = !block.votes() ? Block::kSearchers : block.launch.plan.packed ? 4 : 1;
    const device::Zone zone = block.context.zone;
    const auto share = block.warp_share();
    for (int from = 0; from < block.searchers(); from += step) {
      const auto out = score_output(from > 0, from + step >= block.searchers());
      if (from > 0) {
        __syncthreads();
        ring.prime(zone, share.first, share.end);
      }
      if (!block.votes()) {
        if (from > 0) prepare(from);
        const int quads = (min(block.searchers() - from, step) + 3) / 4;
        device::score_signs<kWords>(ring, zone, share.first, share.end, block.space.queries, quads,
                                    out);
      } else if (block.launch.plan.packed) {
        auto* tables = reinterpret_cast<uint32_t*>(block.tiles());
        device::pack_votes<kWords>(block.context.scratch.votes, from, block.searchers(), tables);
        __syncthreads();
        device::score_votes<kWords>(ring, zone, share.first, share.end, tables, out);
      } else {
        auto* tables = reinterpret_cast<uint8_t*>(block.tiles());
        device::copy_votes<kWords>(block.context.scratch.votes, from, tables);
        __syncthreads();
        device::score_votes<kWords>(ring, zone, share.first, share.end, tables, out);
      }
    }
  }

  /** Ready for `select`: counts of this block, told to the cluster. */
  __device__ __forceinline__ void count_scores() const {
    if (!block.runs(kScore)) {
      const auto share = block.warp_share();
      device::count_scores<kWords>(block.context.scratch.scores, share.first, share.end,
                                   block.histogram());
    }
    __syncthreads();
    device::add_histograms(reinterpret_cast<const uint32_t*>(block.space.top_k.bins),
                           block.space.select);
    block.cluster.arrive();
  }

  /** How many candidates there are. Ends with a barrier. */
  __device__ __forceinline__ int select() const {
    block.cluster.wait();
    int* counts = block.space.top_k.gathered[0];
    device::find_threshold(block.cluster, block.context.searched, counts, counts + 256,
                           block.space.select);
    const auto out = score_output(false, false);
    const bool near_by = block.runs(kScore) && out.near != nullptr;
    const auto share = block.warp_share();
    device::compact_scores<kWords>(block.context.zone, share.first, share.end,
                                   near_by ? out.near : out.scores, near_by ? out.near_unit : 0,
                                   block.histogram(), block.space.select,
                                   block.context.scratch.candidates);
    const int candidates = block.space.select.cut.count;
    if (block.cluster.rank == 0 && threadIdx.x == 0)
      *block.context.scratch.candidate_count = candidates;
    block.cluster.sync();
    return candidates;
  }

  /** What this block reranks; in shared memory where it fits. */
  __device__ __forceinline__ device::Slice slice_of(int candidates) const {
    device::Slice slice;
    slice.first = device::part_begin(candidates, block.cluster.first_part());
    slice.count = device::part_begin(candidates, block.cluster.end_part()) - slice.first;
    slice.kept = (block.call.searchers + 2) * slice.count * 4 <= block.unit_bytes();
    if (slice.kept) {
      slice.offsets = reinterpret_cast<int32_t*>(block.units());
      slice.worth = reinterpret_cast<float*>(block.units()) + slice.count;
      slice.estimates = slice.worth + slice.count;
      slice.stride = slice.count;
    } else {
      slice.offsets = block.context.scratch.candidates + slice.first;
      slice.worth = block.context.scratch.worth + slice.first;
      slice.estimates = block.context.scratch.estimates + slice.first;
      slice.stride = block.context.scratch.candidate_capacity;
    }
    return slice;
  }

  __device__ __forceinline__ void estimate(const device::Slice& slice) const {
    // 1 / sqrt of the rotation, the 255 steps of a weight, and the scale of a logit.
    const float factor =
        __fdiv_rn(__fdiv_rn(block.call.logits.scale, __fsqrt_rn(float(32 * kWords))), 255.0f);
    const int64_t stride = block.context.scratch.candidate_capacity;
    for (int from = 0; from < block.searchers(); from += 4) {
      const int slot = from % Block::kSearchers;
      if (slot == 0 && block.searchers() > Block::kSearchers) {  // else they are all there
        __syncthreads();
        prepare(from);
      }
      device::estimate<kWords>(
          block.context.zone, slice, block.context.scratch.candidates + slice.first,
          block.space.queries.rotated[slot], factor, block.space.centres, block.call.logits.softcap,
          min(block.searchers() - from, 4), from,
          block.context.scratch.estimates + from * stride + slice.first, stride);
    }
    __syncthreads();
  }

  /** Leaves `slice.worth`. Ends with a barrier. */
  __device__ __forceinline__ void weigh(const device::Slice& slice, int candidates) const {
    const bool mean = block.call.group_rule == GroupRule::kMeanQuery;
    const int group = block.context.shape.group;
    const int64_t part = 2 + block.context.shape.head_dim;
    auto* masses = reinterpret_cast<device::Mass*>(block.tiles());
    for (int from = 0; from < group && !mean; from += device::kHeadsPerPass) {
      const int heads = min(group - from, device::kHeadsPerPass);
      if (from > 0) block.cluster.sync();  // nobody reads the masses any more
      device::sum_masses(block.cluster, slice, candidates, from, heads, masses);
      block.cluster.sync();
      const float* bias = block.call.logits.sink_bias;
      if (bias != nullptr) bias += int64_t(block.context.head) * group + from;
      device::sum_up(block.cluster, masses, heads, block.context.scratch.resident + from * part,
                     group * part, part, bias, block.space.all);
      __syncthreads();
      device::add_worth(slice, block.space.all, from, heads);
    }
    for (int i = int(threadIdx.x); i < slice.count; i += device::kThreads) {
      const float worth = mean ? slice.estimates[i] : __fdiv_rn(slice.worth[i], float(group));
      slice.worth[i] = worth;
      block.context.scratch.worth[slice.first + i] = worth;
    }
    __syncthreads();
  }

  /** Ends with a barrier. */
  __device__ __forceinline__ void rerank(int candidates) const {
    if (threadIdx.x == 0) block.space.slice = slice_of(candidates);
    __syncthreads();
    const device::Slice& slice = block.space.slice;
    estimate(slice);
    weigh(slice, candidates);
    const auto key_of = [&](int i) { return device::sortable(slice.worth[i]); };
    device::Cut cut{0, slice.count, slice.first, candidates};  // all of them
    if (candidates > block.call.top_k) {
      cut = device::find_top_k(block.cluster, slice.count, int(block.call.top_k), key_of,
                               block.space.top_k);
    }
    if (threadIdx.x == 0) block.space.select.cut = cut;
    __syncthreads();
    device::compact_keys(slice.count, key_of, block.space.select, [&](int index, int i) {
      block.context.scratch.selected[index] = slice.first + i;
      block.context.scratch.addresses[index] =
          reinterpret_cast<uint64_t>(block.row_at(block.context.zone.begin + slice.offsets[i]));
    });
    if (block.cluster.rank == 0 && threadIdx.x == 0) {
      *block.context.scratch.selected_count = block.wanted(candidates);
    }
    device::before_copies();
    block.cluster.sync();
  }
};

}  // namespace pariskv::cuda
