/**
 * What a block of the decode kernel has: its launch, its part of the scratch, its shared memory.
 */
#pragma once

#include <algorithm>
#include <cstring>

#include "codec/head_scale.h"
#include "decode_flags.cuh"
#include "device/attend.cuh"
#include "device/rerank.cuh"
#include "device/signal.cuh"
#include "device/topk.cuh"
#include "kernels.h"

namespace pariskv::cuda {

/** One launch of one of the kernels. */
struct DecodeLaunch {
  DecodeCall call;
  int scan_blocks, estimate_blocks, resident_blocks;  // per kv head
  int cluster_size;                                   // of the last kernel: a cluster per kv head
  int rehearsing;         // blocks that estimate nothing, ahead of the ones that do
  uint32_t token;         // of this step
  bool scans, estimates;  // what it has
  bool ready_flags;       // blocks that estimate set flags, for which the last kernel waits
  bool stages_queries;    // scans ask for queries, in pieces of 16 bytes, before anything else
  bool
      start_rows_early;  // rows that are certain to be selected set out before the others are known
  device::SegmentDivisor segment;  // by its tokens
  device::IndexDivisor by_heads;   // by kv heads
  device::IndexDivisor by_blocks;  // by what tells the heads of this launch's blocks apart
  int packed;                      // of a scan by votes: four searchers at a time
  int shared_bytes;                // that a block has
};

/** Registers of a thread: two blocks of the scan leave room for 256 threads with 96. With 256
 * dimensions they are not enough, and such blocks come later. */
template <int kWords>
constexpr int kRegistersBesideScan = kWords == 16  ? 240
                                     : kWords == 8 ? 128
                                                   : 96;

/** Blocks that look at the window of a kv head. */
constexpr int kWindowBlocks = device::kWindowRows * device::kRowLanes / device::kThreads;

/** The scratch of one head of one lane: the arrays of ScratchLayout, in its order. */
struct HeadScratch {
  uint8_t* scores;
  device::ScanCounts* counts;  // (kMostScans)
  ReadyFlags flags;
  device::Mass* masses;  // (kSlices, group)
  uint64_t* windows;     // (group, kWindowRows) logits in steps, the token above
  uint8_t* votes;
  int32_t* candidates;
  float* estimates;
  float* worth;
  int32_t* selected;
  device::SelectedRow* rows;
  int32_t* selected_count;
  int32_t* candidate_count;
  float* resident;
  float* fetched;
  int64_t candidate_capacity;
};
static_assert(sizeof(HeadScratch) == (kScratchArrays + 1) * sizeof(void*));

/** What a block works on: read from device memory once, then from shared memory where needed. */
struct HeadContext {
  int row, head;  // of the batch; kv head
  void* const* rows;
  int total;
  int searched;  // candidates wanted; 0: everything is resident
  double vote_ratio;
  device::HeadStatistics statistics;
  device::Zone zone;
  device::AttendShape shape;
  HeadScratch scratch;
};

/** Where the share of block `rank` of a team begins, of so many things: shares differ by one. */
__device__ __forceinline__ int share_begin(int count, int rank, int team) {
  const uint32_t each = uint32_t(count) / uint32_t(team);
  return int(each) * rank + min(rank, int(uint32_t(count) - each * uint32_t(team)));
}

static_assert(kShards == device::kParts && kScoreAlignment == device::kScoreOrigin);
static_assert(kNormShift == device::kNormCodeShift && kNormBase == device::kNormCodeBase);
static_assert(kScaleShift == device::kScaleCodeShift && kQueryLevels == device::kLevels);
static_assert(kNormUnit == device::kUnit && kSubspaceDim == 8);
static_assert(float(kScoreSteps) == device::kSteps);
static_assert(float(kScoreShift* kScoreSteps) == device::kMeanScore);
static_assert(kOctaves == device::kOctaves && kSignVariance == device::kSignVariance);
static_assert(kNatural == device::kNatural && kTwoNatural == device::kTwoNatural);
static_assert(kHalfOctaves == device::kHalfOctaves && kLeastSpread == device::kLeastSpread);
static_assert(kFirstRows == device::kFirstRows && kLastRows == device::kLastRows);
static_assert(kOctaveSteps == device::kOctaveSteps && kMostSteps == device::kMostSteps);
static_assert(kByteLevels == device::kByteLevels && kLeastExponent == device::kLeastExponent);
static_assert(kInvisible == device::kInvisible);

/** What the scratch of a head is for. */
inline ScratchLayout layout_scratch(const ModelShape& shape, int64_t searchers, int64_t top_k,
                                    bool votes, int64_t zone_capacity, int64_t candidate_capacity) {
  int64_t bytes = 0;
  const auto take = [&](int64_t count) {
    const int64_t at = bytes;
    bytes += (count + 255) / 256 * 256;
    return at;
  };
  const int64_t parts = kShards * shape.group * (2 + shape.rows.value_dim);
  const int64_t rows = std::min(top_k, candidate_capacity);
  ScratchLayout at{};
  // The zone may begin within the first alignment, and is scored in units of it.
  at.scores = take((zone_capacity + 2 * kScoreAlignment) / kScoreAlignment * kScoreAlignment);
  at.counts = take(device::kMostScans * int64_t(sizeof(device::ScanCounts)));
  at.flags = take(ReadyFlags::kCount * 4);
  at.masses = take(device::kSlices * shape.group * 8);
  at.windows = take(shape.group * device::kWindowRows * 8);
  at.votes = take(votes ? searchers * shape.rotated_dim / kSubspaceDim * 256 : 0);
  at.candidates = take(candidate_capacity * 4);
  at.estimates = take(searchers * candidate_capacity * 4);
  at.worth = take(candidate_capacity * 4);
  at.selected = take(rows * 4);
  at.rows = take(rows * int64_t(sizeof(device::SelectedRow)));
  at.selected_count = take(4);
  at.candidate_count = take(4);
  at.resident = take(parts * 4);
  at.fetched = take(parts * 4);
  at.bytes = bytes;
  return at;
}

/** As codec/key_statistics.h has them. */
__device__ __forceinline__ device::HeadStatistics statistics_of(const ModelShape& model,
                                                                const void* state, int head) {
  const auto* numbers = static_cast<const int64_t*>(state);
  const int64_t* sums = numbers + 2 * model.kv_heads;
  const auto* counts = reinterpret_cast<const int32_t*>(sums + model.kv_heads * model.rotated_dim);
  return {numbers + head, numbers + model.kv_heads + head, sums + head * model.rotated_dim,
          counts + head * (model.rotated_dim / kSubspaceDim) * 256};
}

/** All but the scratch. */
template <typename Element>
__device__ __forceinline__ void fill_context(const DecodeLaunch& launch, const SequenceView& from,
                                             int row, int head, HeadContext& context) {
  const ModelShape& model = launch.call.shape;
  const SequenceView view = from;  // all of it at once, before anything is stored
  context.row = row;
  context.head = head;
  context.rows = view.rows;
  context.total = int(view.total);
  context.searched = int(view.plan[0]);  // ParisKvPlan: candidates, vote_ratio
  std::memcpy(&context.vote_ratio, &view.plan[1], sizeof context.vote_ratio);
  context.statistics = statistics_of(model, view.state, head);
  context.zone = {view.summaries,
                  {model.kv_heads, model.segment_tokens, model.rotated_dim / kSubspaceDim},
                  launch.segment,
                  head,
                  int(view.zone_begin),
                  int(view.zone_end)};
  context.shape = {int(model.rows.key_dim), int(model.rows.value_dim), int(model.group),
                   int(model.rows.bytes()), launch.call.logits.scale,  launch.call.logits.softcap};
}

/** A block at work for one head: what all kernels share. */
template <typename Element, int kWords>
struct HeadBlock {
  const DecodeCall& call;
  const HeadContext& context;

  __device__ __forceinline__ int searchers() const { return int(call.searchers); }
  __device__ __forceinline__ bool votes() const { return call.scorer == Scorer::kVotes; }
  __device__ __forceinline__ bool mean() const { return call.group_rule == GroupRule::kMeanQuery; }
  __device__ __forceinline__ bool searches() const { return context.searched > 0; }

  __device__ __forceinline__ Element* at(const Rows& tensor, int64_t j) const {
    return reinterpret_cast<Element*>(tensor.data) + context.row * tensor.stride_i +
           j * tensor.stride_j;
  }
  /** Queries of this head. */
  __device__ __forceinline__ const Element* queries() const {
    return at(call.q, int64_t(context.head) * context.shape.group);
  }
  /** The sink biases of this head's queries from `member` on; null: none. */
  __device__ __forceinline__ const float* biases(int member) const {
    if (call.logits.sink_bias == nullptr) return nullptr;
    return call.logits.sink_bias + int64_t(context.head) * context.shape.group + member;
  }
  /** Where the rows of a position's segment lie, in device or host memory. */
  __device__ __forceinline__ char* segment_of(int position) const {
    return static_cast<char*>(context.rows[context.zone.segment(position)]);
  }
  /** Where a position's row lies in its segment. */
  template <typename Byte>
  __device__ __forceinline__ Byte* row_in(Byte* segment, int position) const {
    const int slot = device::split_position(context.zone, position).y;
    return segment + (context.head * context.zone.layout.tokens + slot) * context.shape.row_bytes;
  }
  __device__ __forceinline__ char* row_at(int position) const {
    return row_in(segment_of(position), position);
  }

  /** The rows of q that searchers stand for. */
  __device__ __forceinline__ auto rows_of_searchers() const {
    return rows_of_head(call, context.row, context.head);
  }
  /** The same, when no more is known than what head it is. */
  static __device__ __forceinline__ auto rows_of_head(const DecodeCall& call, int row, int head) {
    return [&call, row, head](int searcher) {
      const int group = int(call.shape.group);
      const bool mean = call.group_rule == GroupRule::kMeanQuery;
      const auto* first = reinterpret_cast<const Element*>(call.q.data) + row * call.q.stride_i +
                          (int64_t(head) * group + searcher) * call.q.stride_j;
      return device::QueryRows<Element>{first, call.q.stride_j, mean ? group : 1, mean,
                                        int(call.shape.rows.key_dim)};
    };
  }
  /** Searchers from `from` on, as many as fit, for votes. All threads; ends with a barrier. */
  __device__ __forceinline__ void prepare_votes(int from, device::Queries<kWords>& out) const {
    const auto load = [&](int slot, float (&x)[kWords]) {
      device::load_query<Element, kWords>(rows_of_searchers()(from + slot), x);
    };
    device::prepare_queries<kWords>(
        call.codec.negative, from, searchers(), load, [](int, const auto&) {}, out);
    __syncthreads();
  }

  /**
   * The same to be scored by signs: what `settle` needs. All threads; ends with a barrier.
   * @param there  queries lie, as they are, where the rotated ones will
   * @param token  of the step, if heads look at windows
   */
  __device__ __forceinline__ void prepare_signs(int from, bool there,
                                                const device::KnownStatistics<kWords>& known,
                                                uint32_t token,
                                                device::Queries<kWords>& out) const {
    const double one = known.usable == 0 ? 0.0 : __ddiv_rn(1.0, double(known.usable));
    const int count = min(searchers() - from, device::kQueries<kWords>);
    const bool look = searchers() > 1;
    device::prepare_queries<kWords>(
        call.codec.negative, from, searchers(),
        [&](int slot, float (&x)[kWords]) {
          if (there) {
#pragma unroll
            for (int r = 0; r < kWords; ++r) {
              const int d = 32 * r + device::lane_id();
              const auto* query = reinterpret_cast<const Element*>(out.rotated[slot]);
              if (d < context.shape.key_dim) x[r] = __fadd_rn(x[r], device::to_float(query[d]));
            }
            __syncwarp();  // it will be overwritten
          } else {
            device::load_query<Element, kWords>(rows_of_searchers()(from + slot), x);
          }
        },
        [&](int slot, const float (&x)[kWords]) {
          float step = 0;
          const device::QuerySums sums = device::quantise<kWords>(x, known, one, out, slot, step);
          if (device::lane_id() != 0) return;
          out.sum[slot] = sums.sum;
          out.scales[slot] = device::scale_of_zone(sums, known.usable, known.square_units, one,
                                                   step, call.logits.scale, 32 * kWords);
        },
        out);
    // From the last warp down: with few searchers it has nothing else to do.
    const int seeing = device::kWarps - 1 - device::warp_id();
    if (look && seeing < count) {
      const uint64_t* rows = context.scratch.windows + (from + seeing) * device::kWindowRows;
      const float seen = device::sum_window(rows, token, biases(from + seeing));
      if (device::lane_id() == 0) out.windows[seeing] = seen;
    }
    __syncthreads();
    if (!look) return;
    const int slot = int(threadIdx.x);
    if (slot < count) {
      const float seen = out.windows[slot], zone = out.scales[slot].total;
      const float most = seen > zone ? seen : zone, least = seen > zone ? zone : seen;
      out.scales[slot].total = __fadd_rn(most, device::rough_exp2(__fsub_rn(least, most)));
    }
    __syncthreads();
  }
};

/**
 * A block's way from its index to its head: false when the lane is nobody's. All threads; to be
 * followed by a barrier.
 * @param also  also(view, head), by one thread
 * @param look  look(lane, head), by one warp
 */
template <typename Element, typename Also, typename Look>
__device__ __forceinline__ bool find_context(const DecodeLaunch& launch, uint32_t index,
                                             HeadContext& context, Also also, Look look) {
  const uint32_t heads = uint32_t(launch.call.shape.kv_heads);
  index += uint32_t(launch.call.first_head);
  const uint32_t row = launch.by_heads(int(index));
  const Lane& lane = launch.call.lanes[row];
  const SequenceView* layers = lane.layers;
  if (layers == nullptr) return false;
  const int head = int(index - row * heads);
  // What takes a trip to memory is asked for by different warps.
  const int array = int(threadIdx.x) - 32;
  if (threadIdx.x == 0) {
    fill_context<Element>(launch, layers[launch.call.layer], int(row), head, context);
  } else if (array >= 0 && array < kScratchArrays) {
    const auto* offsets = reinterpret_cast<const int64_t*>(&lane.at);
    char* where = lane.scratch + head * lane.at.bytes + offsets[array];
    std::memcpy(reinterpret_cast<char*>(&context.scratch) + array * sizeof where, &where,
                sizeof where);
  } else if (threadIdx.x == 64) {
    context.scratch.candidate_capacity = lane.candidate_capacity;
  } else if (threadIdx.x == 96) {
    also(layers[launch.call.layer], head);
  } else if (device::warp_id() == 4) {
    look(lane, head);
  }
  return true;
}
template <typename Element, typename Also>
__device__ __forceinline__ bool find_context(const DecodeLaunch& launch, uint32_t index,
                                             HeadContext& context, Also also) {
  return find_context<Element>(launch, index, context, also, [](const Lane&, int) {});
}
template <typename Element>
__device__ __forceinline__ bool find_context(const DecodeLaunch& launch, uint32_t index,
                                             HeadContext& context) {
  return find_context<Element>(launch, index, context, [](const SequenceView&, int) {});
}
static_assert(kScratchArrays <= 32);

}  // namespace pariskv::cuda
