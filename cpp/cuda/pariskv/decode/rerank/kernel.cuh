/**
 * select and rerank: every head's candidates are found and their logits estimated. Blocks that
 * start before all keys are scored look at queries meanwhile; a few more bring the code into the
 * instruction cache.
 */
#pragma once

#include <algorithm>

#include "pariskv/decode/context.cuh"
#include "pariskv/decode/flags.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/rerank/estimate.cuh"
#include "pariskv/decode/rerank/select.cuh"
#include "policy/pariskv/budget.h"
#include "policy/pariskv/rules.h"

namespace pariskv::cuda {

/** Candidates of a block that are listed in shared memory; more are read from scratch. */
constexpr int kListed = 1024;
/** Keys of a slice that stand for all keys that are no candidates. */
constexpr int kSamplesOfSlice = int(kSampledKeys) / device::kSlices;
/** Segments of a zone whose addresses are. */
constexpr int kKnownSegments = 1024;

template <int kWords>
struct RerankSpace {
  HeadContext context;
  device::SliceMasses masses;
  device::KeyPlace places[3][device::kGathered<kWords>];  // of chunks, by turns
  int blocks[3][device::kGathered<kWords>];               // of the same keys
  uint8_t* segments[kKnownSegments];                      // from the first of the zone on
  int32_t offsets[kListed];                               // of the first candidates
  device::LevelTable::Copies levels;
  alignas(16) float queries[4][device::EstimateQueries<kWords>::kPitch];  // rotated
  uint8_t samples[int(kSampledKeys)];                                     // scores of this block's
  int first_segment;                                                      // of the zone
  uint32_t scored;  // blocks that had scored when this one began: a bit each
  int threshold;    // the least score of a candidate
};

/** Shared memory after the space: counts of scores, and then codes. */
template <int kWords>
constexpr int kRerankBytes =
    std::max(int(sizeof(device::ThresholdSpace)), device::kGatherBytes<kWords>);

template <typename Element, int kWords>
struct Rerank {
  const RerankParams& params;
  RerankSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  int rank;                    // of the blocks of a head, which share its slices
  int first_slice, end_slice;  // of this one
  bool warms_up;

  __device__ __forceinline__ char* room() const {
    return reinterpret_cast<char*>(&space) + (sizeof space + 127) / 128 * 128;
  }

  /** Addresses of the zone's segments, or of the first of them. */
  __device__ __forceinline__ void load_segments() const {
    const device::Zone& zone = block.context.zone;
    const int first = device::split_position(zone, zone.begin).x;
    if (threadIdx.x == 0) space.first_segment = first;
    const int count = min(device::split_position(zone, zone.end - 1).x + 1 - first, kKnownSegments);
    for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
      device::ptx::cp_async_ca(&space.segments[i], &zone.summaries[first + i]);
    }
    device::ptx::cp_async_commit_group();
  }

  /** Until all keys of the head are scored. Ends with a barrier. */
  __device__ __forceinline__ void await_scores() const {
    if (!params.awaits_flags) {
      device::wait_for_predecessor();
      __syncthreads();
    } else {
      ReadyFlags{block.context.scratch.flags}.await_scored(params.score_blocks, params.token);
    }
  }

  /** Whether all keys were scored when this block began: then it looks at queries later. */
  __device__ __forceinline__ bool is_late() const {
    const uint32_t needed = ~0u >> (32 - params.score_blocks);
    return (space.scored & needed) == needed;
  }

  /** Finds the candidates of this block's slices; returns the head's. Ends with a barrier. */
  __device__ __forceinline__ int select() const {
    auto& scores = *reinterpret_cast<device::ThresholdSpace*>(room());
    const device::Zone& zone = block.context.zone;
    const int score_blocks = params.score_blocks;
    const int sample = score_of_sample();
    device::find_threshold(block.context.scratch.counts, score_blocks, block.context.searched,
                           scores);
    if (int(threadIdx.x) < int(kSampledKeys)) space.samples[threadIdx.x] = uint8_t(sample);
    const int count = scores.count;
    const int first = device::slice_begin(count, first_slice);
    const int last = device::slice_begin(count, end_slice);
    const int units = zone.units(device::kUnitKeys<kWords>), shift = zone.begin - zone.origin();
    const auto range = device::narrow(
        block.context.scratch.counts, score_blocks,
        [&](int rank) { return device::share_begin(units, rank, score_blocks); },
        device::kUnitKeys<kWords>, first, last, scores);
    int32_t* candidates = block.context.scratch.candidates;
    device::compact_scores(block.context.scratch.scores, range, shift, first, last, scores,
                           [&](int index, int offset) {
                             candidates[index] = offset;
                             if (index - first < kListed) space.offsets[index - first] = offset;
                           });
    if (rank == 0 && threadIdx.x == 0) *block.context.scratch.candidate_count = count;
    if (rank == 0 && params.call.weighs) clear_squares();
    if (threadIdx.x == 0) space.threshold = scores.threshold;
    device::ptx::cp_async_wait_group<0>();  // addresses of segments
    __syncthreads();
    return count;
  }

  __device__ __forceinline__ int slices() const { return end_slice - first_slice; }

  /** Keys that are brought together: some tiles, counted from this block's first one. */
  struct Chunk {
    int tile, end;

    __device__ __forceinline__ int count() const {
      return min(end - tile, device::kGathered<kWords> / device::kTileKeys);
    }
    __device__ __forceinline__ bool left() const { return tile < end; }
    __device__ __forceinline__ Chunk next() const {
      return {tile + device::kGathered<kWords> / device::kTileKeys, end};
    }
  };

  /** Of a candidate, from the zone's begin; `listed` counts from this block's first one. */
  __device__ __forceinline__ int offset_of(int candidate, int listed) const {
    return listed < kListed ? space.offsets[listed]
                            : __ldcg(block.context.scratch.candidates + candidate);
  }
  __device__ __forceinline__ int zone_keys() const {
    return block.context.zone.end - block.context.zone.begin;
  }
  /** Where a sampled key lies, from the zone's begin: a zone of fewer keys has all as samples. */
  __device__ __forceinline__ int place_of_sample(int sample) const {
    const int step = max(zone_keys() / int(kSampledKeys), 1);
    return step / 2 + step * sample;
  }
  /** How many keys a sample stands for, as a logarithm. */
  __device__ __forceinline__ float log_weight_of_sample() const {
    return logf(__fdiv_rn(float(zone_keys()), float(min(zone_keys(), int(kSampledKeys)))));
  }
  /** The score of the sampled key that this thread looks up; 0 where there is none. */
  __device__ __forceinline__ int score_of_sample() const {
    const device::Zone& zone = block.context.zone;
    const int mine = int(threadIdx.x), sample = first_slice * kSamplesOfSlice + mine;
    if (mine >= kSamplesOfSlice * slices() || sample >= zone_keys()) return 0;
    return __ldcg(block.context.scratch.scores + (zone.begin - zone.origin()) +
                  place_of_sample(sample));
  }
  /** Of a sampled key; -1 where there is none, or one that scores as a candidate may. */
  __device__ __forceinline__ int offset_of_sample(int sample) const {
    const int score = space.samples[sample - first_slice * kSamplesOfSlice];
    return score > 0 && score < space.threshold ? place_of_sample(sample) : -1;
  }

  /** Where the keys of a chunk are: candidates, then samples. To be followed by a barrier. */
  __device__ __forceinline__ void locate(const Chunk& chunk, int turn, int candidates,
                                         const device::Tiles& tiles) const {
    const int in_chunk = int(threadIdx.x) / device::kTileKeys;
    if (!chunk.left() || in_chunk >= chunk.count()) return;
    const int tile = chunk.tile + in_chunk, of_block = tiles.slice_of(tile);
    const int slice = first_slice + of_block;
    const int first = device::slice_begin(candidates, slice);
    const int end = device::slice_begin(candidates, slice + 1);
    const int candidate = first + (tile - of_block * tiles.of_slice) * device::kTileKeys +
                          int(threadIdx.x) % device::kTileKeys;
    int offset = -1, name = -1;
    if (candidate < end) {
      offset = offset_of(candidate, candidate - device::slice_begin(candidates, first_slice));
      name = candidate;
    } else if (candidate < end + kSamplesOfSlice) {
      const int sample = slice * kSamplesOfSlice + candidate - end;
      offset = offset_of_sample(sample);
      name = -1 - sample;
    }
    device::KeyPlace& place = space.places[turn % 3][threadIdx.x];
    if (offset < 0) {
      place = {nullptr, 0, -1};
      return;
    }
    const device::Zone& zone = block.context.zone;
    const int2 at = device::split_position(zone, zone.begin + offset);
    const int known = at.x - space.first_segment;
    place = {known < kKnownSegments ? space.segments[known] : zone.summaries[at.x], at.y, name};
    space.blocks[turn % 3][threadIdx.x] =
        ((zone.begin + offset) >> zone.block_bits) - zone.first_block();
  }
  /** Sets a chunk that has been located on its way. */
  __device__ __forceinline__ void bring(const Chunk& chunk, int turn,
                                        const device::Gather<kWords>& gather) const {
    if (chunk.left()) {
      gather.start(space.places[turn % 3], chunk.count() * device::kTileKeys, half(turn));
    }
    device::ptx::cp_async_commit_group();
  }
  __device__ __forceinline__ char* half(int turn) const {
    return room() + turn % 2 * (device::kGatherBytes<kWords> / 2);
  }

  using Queries = device::EstimateQueries<kWords>;

  __device__ __forceinline__ int heads_from(int from) const {
    return min(block.searchers() - from, 4);
  }
  /** The warp's query of up to four from `from` on. */
  __device__ __forceinline__ void load(int from, float (&x)[kWords]) const {
    if (device::warp_id() >= heads_from(from)) return;
    device::load_query<Element, kWords>(block.rows_of_searchers()(from + device::warp_id()), x);
    block.stretch(x);
  }
  /** All of these, and levels. Has a barrier. */
  __device__ __forceinline__ void prepare(int from, float (&x)[kWords], Queries& queries,
                                          device::LevelTable& levels) const {
    const int warp = device::warp_id();
    if (warp < 4) {
      device::rotate<kWords>(params.call.codec.negative, x);  // zeros stay zeros
      // 1 / sqrt of the rotation, the 255 steps of a weight, and the scale of a logit.
      const float factor =
          __fdiv_rn(__fdiv_rn(block.call.logits.scale, __fsqrt_rn(float(32 * kWords))), 255.0f);
#pragma unroll
      for (int r = 0; r < kWords; ++r) {
        space.queries[warp][Queries::at(32 * r + device::lane_id())] = __fmul_rn(x[r], factor);
      }
      if (params.call.looks_beyond && rank == 0) note_length(from, x, factor);
    }
    __syncthreads();
    queries.load(space.queries[0]);
    levels.load(space.levels);
  }

  /** How far estimates for the warp's query are off: see kEstimateNoise. */
  __device__ __forceinline__ void note_length(int from, const float (&x)[kWords],
                                              float factor) const {
    float square = 0;
#pragma unroll
    for (int r = 0; r < kWords; ++r) square += (x[r] * factor) * (x[r] * factor);
    square = device::warp_sum(square);
    const int head = device::warp_id();
    if (warms_up || head >= heads_from(from) || device::lane_id() > 0) return;
    block.context.scratch.errors[from + head].noise = kEstimateNoise * __fsqrt_rn(square);
  }
  /** Of the tail, which the last kernel adds up. */
  __device__ __forceinline__ void clear_squares() const {
    for (int head = int(threadIdx.x); head < block.context.shape.group; head += device::kThreads) {
      block.context.scratch.errors[head].squares = 0;
    }
  }
  /** Samples that are candidates, or are not there, have no logit. */
  __device__ __forceinline__ void clear_samples(int from, int heads) const {
    const int sample = first_slice * kSamplesOfSlice + int(threadIdx.x);
    if (sample >= end_slice * kSamplesOfSlice || offset_of_sample(sample) >= 0) return;
    for (int head = from; head < from + heads; ++head) {
      block.context.scratch.errors[head].samples[sample] = -device::infinity();
    }
  }

  /**
   * Logits and masses of this block's slices, for up to four queries starting at `from`. If `late`,
   * the block prepares them while codes are in flight.
   */
  __device__ __forceinline__ void estimate(int candidates, int from, float (&x)[kWords],
                                           Queries& queries, device::LevelTable& levels,
                                           const device::Gather<kWords>& gather, float log_weight,
                                           bool late) const {
    const HeadScratch& scratch = block.context.scratch;
    const device::EstimateOutput out{
        scratch.estimates + from * block.context.candidate_capacity,
        int(block.context.candidate_capacity),
        heads_from(from),
        block.call.logits.softcap,
        log_weight,
        BlockSteps(block.context.zone, scratch.block_steps + from, block.searchers()),
        params.call.looks_beyond,
        from,
        scratch};
    if (params.call.looks_beyond && !warms_up) clear_samples(from, out.heads);
    const device::Tiles tiles(candidates, kSamplesOfSlice);
    const int slices = warms_up ? 1 : this->slices();
    // Three chunks at a time: one is located, one is on its way, one is worked on.
    Chunk chunk{0, slices * tiles.of_slice};
    locate(chunk, 0, candidates, tiles);
    locate(chunk.next(), 1, candidates, tiles);
    __syncthreads();
    bring(chunk, 0, gather);
    if (late) prepare(from, x, queries, levels);
    device::MassesOfWarp masses(tiles);
#pragma unroll 1
    for (int turn = 0; chunk.left(); ++turn) {
      const Chunk next = chunk.next();
      bring(next, turn + 1, gather);
      locate(next.next(), turn + 2, candidates, tiles);
      device::ptx::cp_async_wait_group<1>();
      __syncthreads();
      device::estimate<kWords>(queries, levels, half(turn), space.places[turn % 3],
                               space.blocks[turn % 3], chunk.tile, chunk.count(),
                               first_slice * tiles.of_slice + chunk.tile, tiles, out, masses,
                               space.masses);
      __syncthreads();
      chunk = next;
    }
    device::ptx::cp_async_wait_group<0>();
    masses.advance(chunk.end, tiles, space.masses);
    __syncthreads();
    if (warms_up) return;
    for (int i = int(threadIdx.x); i < slices * out.heads; i += device::kThreads) {
      const int slice = i / out.heads, head = i % out.heads;
      scratch.masses[(first_slice + slice) * block.context.shape.group + from + head] =
          device::sum_of(space.masses[slice][head]);
    }
  }

  /** All of it: work without scores comes first. A block that warms up has no candidates. */
  __device__ __forceinline__ void run() const {
    Queries queries;
    device::LevelTable levels;
    device::LevelTable::copy(params.call.codec.centres, space.levels);
    const device::Gather<kWords> gather(block.context.zone);
    if (int(threadIdx.x) < int(kSampledKeys)) space.samples[threadIdx.x] = 0;
    const float log_weight = log_weight_of_sample();
    int candidates = 0;
#pragma unroll 1
    for (int from = 0; from < block.searchers(); from += 4) {
      if (from > 0) __syncthreads();
      float x[kWords] = {};
      load(from, x);
      const bool selects = from == 0 && !warms_up, late = selects && is_late();
      if (!late) prepare(from, x, queries, levels);
      if (selects) {
        if (!late) await_scores();
        candidates = select();
      }
      estimate(candidates, from, x, queries, levels, gather, log_weight, late);
      if (warms_up) break;
    }
    set_flag();
  }

  /**
   * Sets this block's flag. One block is left until resident rows are attended to, so the end of
   * this kernel says that they are. Other blocks make room for the next kernel.
   */
  __device__ __forceinline__ void set_flag() const {
    if (!warms_up && params.sets_flags) {
      ReadyFlags{block.context.scratch.flags}.set(ReadyFlags::kReranked + rank, params.token);
    }
    if (blockIdx.x == 0) device::wait_for_predecessor();
  }
};

template <typename Element, int kWords>
__global__ void __maxnreg__(kRegistersBesideScore<kWords>)
    rerank_kernel(const __grid_constant__ RerankParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  static_assert(sizeof(RerankSpace<kWords>) + 128 + kRerankBytes<kWords> <= kLeastSharedBytes);
  auto& space = *reinterpret_cast<RerankSpace<kWords>*>(shared);
  // The first blocks have no candidates: they bring the code into the instruction cache.
  const bool warms_up = int(blockIdx.x) < params.warmup_blocks;
  const int index = int(blockIdx.x) - (warms_up ? 0 : params.warmup_blocks);
  const int head = warms_up ? index : int(params.by_blocks(index));
  const int rank = warms_up ? 0 : index - head * params.blocks_per_head;
  // A launch fetches its kernel's code, unless another launch was just before it: so the last
  // kernel's comes later, where it would come at once.
  if (!params.sets_flags) device::let_successor_start();
  const auto look = [&](const ParisKVSlot& slot, int head) {
    const int64_t words = head * slot.head_bytes / int64_t(sizeof(uint32_t));
    const ReadyFlags flags{slot.scratch.flags + words};
    const uint32_t scored = params.awaits_flags ? flags.scored(params.token) : 0;
    if (device::lane_id() == 0) space.scored = scored;
  };
  if (!find_context<Element>(
          params, uint32_t(head), space.context, [](const SequenceView&, int) {}, look)) {
    return device::wait_for_predecessor();
  }
  __syncthreads();
  if (params.sets_flags) device::let_successor_start();
  const HeadBlock<Element, kWords> block{params.call, space.context};
  if (!block.searches()) return device::wait_for_predecessor();
  const int blocks = params.blocks_per_head;
  const Rerank<Element, kWords> rerank{params,
                                       space,
                                       block,
                                       rank,
                                       device::share_begin(device::kSlices, rank, blocks),
                                       device::share_begin(device::kSlices, rank + 1, blocks),
                                       warms_up};
  rerank.load_segments();
  rerank.run();
}

}  // namespace pariskv::cuda
