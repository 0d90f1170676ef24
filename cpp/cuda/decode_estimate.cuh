/**
 * The step after the scan: every head's candidates are found and their logits estimated. Blocks
 * that are there before the scan is done look at queries meanwhile, and a few of them rehearse.
 */
#pragma once

#include <algorithm>

#include "decode_space.cuh"
#include "device/select.cuh"

namespace pariskv::cuda {

/** Candidates of a block that are kept in shared memory; the others are read from scratch. */
constexpr int kListed = 1024;
/** Keys of a slice that stand for those that are no candidates. */
constexpr int kSamplesOfSlice = int(kSampledKeys) / device::kSlices;
/** Segments of a zone whose addresses are. */
constexpr int kKnownSegments = 1024;

template <int kWords>
struct EstimateSpace {
  HeadContext context;
  device::Mass masses[2][4][device::kWarps];              // of a slice, by turns
  device::KeyPlace places[3][device::kGathered<kWords>];  // of chunks, by turns
  uint8_t* segments[kKnownSegments];                      // from the first of the zone on
  int32_t offsets[kListed];                               // of the first candidates
  alignas(16) float queries[4][device::EstimateQueries<kWords>::kPitch];  // rotated
  uint8_t samples[int(kSampledKeys)];                                     // scores of this block's
  int threshold;  // what a candidate scores, at least
};

/** Shared memory after the space: counts of scores, and then codes. */
template <int kWords>
constexpr int kEstimateBytes =
    std::max(int(sizeof(device::ScoreSpace)), device::kGatherBytes<kWords>);

template <typename Element, int kWords>
struct Estimate {
  const DecodeLaunch& launch;
  EstimateSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  int share, rank;  // the blocks of a head, which share its slices, and this one of them

  __device__ __forceinline__ char* room() const {
    return reinterpret_cast<char*>(&space) + (sizeof space + 127) / 128 * 128;
  }

  /** The first segment of the zone. */
  __device__ __forceinline__ int first_segment() const {
    return device::split_position(block.context.zone, block.context.zone.begin).x;
  }
  /** Addresses of the zone's segments, or of the first of them. */
  __device__ __forceinline__ void load_segments() const {
    const device::Zone& zone = block.context.zone;
    const int first = first_segment();
    const int count = min((zone.end - 1) / int(zone.layout.tokens) + 1 - first, kKnownSegments);
    for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
      space.segments[i] = zone.summaries[first + i];
    }
  }

  /** Finds the candidates of this block's slices; returns how many the head has. Ends with a
   * barrier. */
  __device__ __forceinline__ int select() const {
    auto& scores = *reinterpret_cast<device::ScoreSpace*>(room());
    const device::Zone& zone = block.context.zone;
    const int scans = launch.team;
    const int sample = score_of_sample();
    device::find_threshold(block.context.scratch.counts, scans, block.context.searched, scores);
    if (int(threadIdx.x) < int(kSampledKeys)) space.samples[threadIdx.x] = uint8_t(sample);
    const int count = scores.count;
    const int first = device::slice_begin(count, first_slice());
    const int last = device::slice_begin(count, end_slice());
    const int units = zone.template units<kWords>(), shift = zone.begin - zone.origin();
    const auto range = device::narrow(
        block.context.scratch.counts, scans,
        [&](int scan) { return scan_begin(units, scan, scans); }, device::kUnitKeys<kWords>, first,
        last, scores);
    int32_t* candidates = block.context.scratch.candidates;
    device::compact_scores(block.context.scratch.scores, range, shift, first, last, scores,
                           [&](int index, int offset) {
                             candidates[index] = offset;
                             if (index - first < kListed) space.offsets[index - first] = offset;
                           });
    if (rank == 0 && threadIdx.x == 0) *block.context.scratch.candidate_count = count;
    if (threadIdx.x == 0) space.threshold = scores.threshold;
    __syncthreads();
    return count;
  }

  __device__ __forceinline__ int first_slice() const { return rank * (device::kSlices / share); }
  __device__ __forceinline__ int end_slice() const {
    return first_slice() + device::kSlices / share;
  }

  /** Keys that are brought together: candidates of one slice, and at its end its samples. */
  struct Chunk {
    int slice, end_slice;
    int at, end;  // of the slice, among all candidates; samples included
    int all;

    __device__ __forceinline__ int count() const {
      return min(end - at, device::kGathered<kWords>);
    }
    __device__ __forceinline__ int end_of_candidates() const { return end - kSamplesOfSlice; }
    __device__ __forceinline__ int candidates() const {
      return min(max(end_of_candidates() - at, 0), count());
    }
    __device__ __forceinline__ bool left() const { return slice < end_slice; }
    __device__ __forceinline__ bool last_of_slice() const {
      return at + device::kGathered<kWords> >= end;
    }
    /** To the first keys of a slice. */
    __device__ __forceinline__ void start(int first) {
      slice = first;
      at = device::slice_begin(all, slice);
      end = device::slice_begin(all, slice + 1) + kSamplesOfSlice;
    }
    __device__ __forceinline__ void advance() {
      at += device::kGathered<kWords>;
      if (at >= end) start(slice + 1);
    }
  };

  /** Of a candidate, from the zone's begin. */
  __device__ __forceinline__ int offset_of(const Chunk& chunk, int index) const {
    const int listed = index - device::slice_begin(chunk.all, first_slice());
    return listed < kListed ? space.offsets[listed]
                            : __ldcg(block.context.scratch.candidates + index);
  }
  __device__ __forceinline__ int sampled() const {
    return min(block.context.zone.end - block.context.zone.begin, int(kSampledKeys));
  }
  /** Where a sampled key lies, from the zone's begin. */
  __device__ __forceinline__ int place_of_sample(int sample) const {
    const int step = (block.context.zone.end - block.context.zone.begin) / sampled();
    return step / 2 + step * sample;
  }
  /** The score of the sampled key that this thread looks up; 0 where there is none. */
  __device__ __forceinline__ int score_of_sample() const {
    const device::Zone& zone = block.context.zone;
    const int mine = int(threadIdx.x), sample = first_slice() * kSamplesOfSlice + mine;
    if (mine >= kSamplesOfSlice * (end_slice() - first_slice()) || sample >= sampled()) return 0;
    return __ldcg(block.context.scratch.scores + (zone.begin - zone.origin()) +
                  place_of_sample(sample));
  }
  /** Of a sampled key; -1 where there is none, or one that scores as a candidate may. */
  __device__ __forceinline__ int offset_of_sample(int sample) const {
    const int score = space.samples[sample - first_slice() * kSamplesOfSlice];
    return score > 0 && score < space.threshold ? place_of_sample(sample) : -1;
  }

  /** Looks up where the keys of a chunk are. To be followed by a barrier. */
  __device__ __forceinline__ void locate(const Chunk& chunk, int turn) const {
    if (!chunk.left() || int(threadIdx.x) >= chunk.count()) return;
    const device::Zone& zone = block.context.zone;
    const int index = chunk.at + int(threadIdx.x), sample = index - chunk.end_of_candidates();
    const int offset = sample < 0 ? offset_of(chunk, index)
                                  : offset_of_sample(chunk.slice * kSamplesOfSlice + sample);
    device::KeyPlace& place = space.places[turn % 3][threadIdx.x];
    if (offset < 0) {
      place = {nullptr, 0};
      return;
    }
    const int2 at = device::split_position(zone, zone.begin + offset);
    const int known = at.x - first_segment();
    place = {known < kKnownSegments ? space.segments[known] : zone.summaries[at.x], at.y};
  }
  /** Sets a chunk that has been located on its way. */
  __device__ __forceinline__ void bring(const Chunk& chunk, int turn,
                                        const device::Gather<kWords>& gather) const {
    if (chunk.left()) {
      gather.start(space.places[turn % 3], chunk.count(), half(turn));
    }
    device::close_stage();
  }
  __device__ __forceinline__ char* half(int turn) const {
    return room() + turn % 2 * (device::kGatherBytes<kWords> / 2);
  }

  using Queries = device::EstimateQueries<kWords>;

  __device__ __forceinline__ int heads_from(int from) const {
    return min(block.searchers() - from, 4);
  }
  /** Up to four queries from `from` on, a warp each. Ends with a barrier. */
  __device__ __forceinline__ void prepare(int from, Queries& queries) const {
    const int warp = device::warp_id();
    if (warp < 4) {
      float x[kWords] = {};
      if (warp < heads_from(from)) {
        device::load_query<Element, kWords>(block.rows_of_searchers()(from + warp), x);
        device::rotate<kWords>(launch.call.codec.negative, x);
      }
      // 1 / sqrt of the rotation, the 255 steps of a weight, and the scale of a logit.
      const float factor =
          __fdiv_rn(__fdiv_rn(block.call.logits.scale, __fsqrt_rn(float(32 * kWords))), 255.0f);
#pragma unroll
      for (int r = 0; r < kWords; ++r) {
        space.queries[warp][Queries::at(32 * r + device::lane_id())] = __fmul_rn(x[r], factor);
      }
    }
    __syncthreads();
    queries.load(space.queries[0]);
  }

  /**
   * Logits of the candidates in slices from this block's first one to `end`, and their masses, for
   * up to four queries from `from` on.
   */
  __device__ __forceinline__ void estimate(int candidates, int end, int from,
                                           const Queries& queries, const device::LevelTable& levels,
                                           const device::Gather<kWords>& gather) const {
    const HeadScratch& scratch = block.context.scratch;
    const int heads = heads_from(from);
    float* out = scratch.estimates + from * scratch.candidate_capacity;
    // Three chunks at a time: one is located, one is on its way, one is worked on.
    Chunk chunk{0, end, 0, 0, candidates};
    chunk.start(first_slice());
    Chunk next = chunk;
    next.advance();
    locate(chunk, 0);
    locate(next, 1);
    __syncthreads();
    bring(chunk, 0, gather);
    device::Mass* sums = scratch.masses + from + int(threadIdx.x);  // of the threads that add up
    const int zone_keys = block.context.zone.end - block.context.zone.begin;
    const float log_weight = logf(__fdiv_rn(float(zone_keys), float(sampled())));
    device::TwoMasses masses;
    masses.clear();
#pragma unroll 1
    for (int turn = 0; chunk.left(); ++turn) {
      bring(next, turn + 1, gather);
      Chunk third = next;
      if (third.left()) third.advance();
      locate(third, turn + 2);
      device::await_stage<1>();
      __syncthreads();
      device::estimate<kWords>(queries, levels, half(turn), space.places[turn % 3], chunk.count(),
                               chunk.candidates(), log_weight, block.call.logits.softcap, heads,
                               out + chunk.at, scratch.candidate_capacity, masses);
      const bool ends = chunk.last_of_slice();
      auto& of_warps = space.masses[chunk.slice % 2];
      if (ends) {
        masses.add_lanes();
        if (device::lane_id() < 2) {
          of_warps[2 * device::lane_id()][device::warp_id()] = masses.of[0];
          of_warps[2 * device::lane_id() + 1][device::warp_id()] = masses.of[1];
        }
        masses.clear();
      }
      __syncthreads();
      if (ends && int(threadIdx.x) < heads) {
        sums[chunk.slice * block.context.shape.group] = device::sum_of(of_warps[threadIdx.x]);
      }
      chunk = next;
      next = third;
    }
    device::await_stage<0>();
  }

  /**
   * Finds candidates and estimates them, once all keys are scored; what needs no scores comes
   * before. Who is `early` also rehearses, on no candidates: the code is there when it is needed.
   */
  __device__ __forceinline__ void run(bool early) const {
    Queries queries;
    device::LevelTable levels;
    levels.load(launch.call.codec.centres);
    const device::Gather<kWords> gather(block.context.zone);
    if (int(threadIdx.x) < int(kSampledKeys)) space.samples[threadIdx.x] = 0;
    int candidates = 0;
#pragma unroll 1
    for (int pass = -1; 4 * pass < block.searchers(); ++pass) {
      const int from = 4 * max(pass, 0);
      if (pass != 0) {
        __syncthreads();
        prepare(from, queries);
      }
      if (pass == 0) {
        device::wait_for_predecessor();
        candidates = select();
      }
      if (pass < 0 && !early) continue;
      estimate(candidates, pass < 0 ? first_slice() + 1 : end_slice(), from, queries, levels,
               gather);
    }
  }
};

/** Blocks that rehearse: the first ones, which are there first. */
constexpr uint32_t kRehearsing = 8;

template <typename Element, int kWords>
__global__ void __maxnreg__(kRegistersBesideScan<kWords>)
    estimate_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<EstimateSpace<kWords>*>(shared);
  const uint32_t share = uint32_t(launch.share);
  device::let_successor_start();
  // Whoever ends has waited: else the kernel might end before the one that it follows.
  if (!find_context<Element>(launch.call, blockIdx.x / share, space.context)) {
    return device::wait_for_predecessor();
  }
  __syncthreads();
  const HeadBlock<Element, kWords> block{launch.call, space.context};
  if (!block.searches()) return device::wait_for_predecessor();
  const Estimate<Element, kWords> estimate{launch, space, block, int(share),
                                           int(blockIdx.x % share)};
  estimate.load_segments();
  estimate.run(blockIdx.x < kRehearsing);
}

}  // namespace pariskv::cuda
