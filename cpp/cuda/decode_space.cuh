/**
 * What a block of the decode kernel has: its launch, its part of the scratch, its shared memory.
 */
#pragma once

#include "codec/head_scale.h"
#include "device/attend.cuh"
#include "device/rerank.cuh"
#include "device/topk.cuh"
#include "kernels.h"

namespace pariskv::cuda {

/** One launch of one of the kernels. */
struct DecodeLaunch {
  DecodeCall call;
  int team;          // blocks per kv head: of a scan, or the cluster that takes rows
  int share;         // blocks per kv head that estimate
  int resident;      // blocks per kv head for resident rows
  int rehearsing;    // blocks besides, ahead of those
  uint32_t token;    // of this step; 0: it has no scan
  int stages;        // of a scan: units that a warp has under way
  int packed;        // of a scan by votes: four searchers at a time
  int shared_bytes;  // that a block has
};

/** Registers of a thread: two blocks of the scan leave room for 256 threads with 96. With 256
 * dimensions they are not enough, and such blocks come later. */
template <int kWords>
constexpr int kRegistersBesideScan = kWords == 8 ? 128 : 96;

/** The scratch of one head of one lane. */
struct HeadScratch {
  uint8_t* scores;
  device::ScanCounts* counts;  // (kMostScans)
  uint32_t* scanned;           // (kMostScans)
  device::Mass* masses;        // (kSlices, group)
  int* windows;                // (group, kWindowRows) logits in steps
  uint8_t* votes;
  int32_t* candidates;
  float* estimates;
  float* worth;
  int32_t* selected;
  uint64_t* addresses;
  int32_t* fresh;
  int32_t* selected_count;
  int32_t* candidate_count;
  float* resident;
  float* fetched;
  int64_t candidate_capacity;
};

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

/** Where the share of scan `rank` of a team begins, of so many units. */
__device__ __forceinline__ int scan_begin(int units, int rank, int team) {
  return int(uint32_t(units) * uint32_t(rank) / uint32_t(team));
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

/** Computed alike by host and device. */
__host__ __device__ inline ScratchLayout layout_scratch(const ModelShape& shape, int64_t searchers,
                                                        int64_t top_k, bool votes,
                                                        int64_t zone_capacity,
                                                        int64_t candidate_capacity) {
  int64_t bytes = 0;
  const auto take = [&](int64_t count) {
    const int64_t at = bytes;
    bytes += (count + 255) / 256 * 256;
    return at;
  };
  const int64_t heads = shape.kv_heads;
  const int64_t parts = heads * kShards * shape.group * (2 + shape.head_dim);
  ScratchLayout at{};
  // The zone may begin within the first alignment, and is scored in units of it.
  at.score_stride = (zone_capacity + 2 * kScoreAlignment) / kScoreAlignment * kScoreAlignment;
  at.scores = take(heads * at.score_stride);
  at.counts = take(heads * device::kMostScans * int64_t(sizeof(device::ScanCounts)));
  at.scanned = take(heads * device::kMostScans * 4);
  at.masses = take(heads * device::kSlices * shape.group * 8);
  at.windows = take(heads * shape.group * device::kWindowRows * 4);
  at.votes = take(votes ? heads * searchers * shape.rotated_dim / kSubspaceDim * 256 : 0);
  at.candidates = take(heads * candidate_capacity * 4);
  at.estimates = take(heads * searchers * candidate_capacity * 4);
  at.worth = take(heads * candidate_capacity * 4);
  at.selected_stride = top_k < candidate_capacity ? top_k : candidate_capacity;
  at.selected = take(heads * at.selected_stride * 4);
  at.addresses = take(heads * at.selected_stride * 8);
  at.fresh = take(heads * at.selected_stride * 4);
  at.selected_count = take(heads * 4);
  at.candidate_count = take(heads * 4);
  at.resident = take(parts * 4);
  at.fetched = take(parts * 4);
  at.bytes = bytes;
  return at;
}

__device__ inline HeadScratch scratch_of(const DecodeCall& call, const Lane& lane, int head) {
  const ModelShape& shape = call.shape;
  const ScratchLayout at =
      layout_scratch(shape, call.searchers, call.top_k, call.scorer == Scorer::kVotes,
                     lane.zone_capacity, lane.candidate_capacity);
  const int64_t capacity = lane.candidate_capacity;
  const int64_t part = head * (kShards * shape.group * (2 + shape.head_dim));
  char* base = lane.scratch;
  HeadScratch scratch;
  scratch.scores = reinterpret_cast<uint8_t*>(base + at.scores) + head * at.score_stride;
  scratch.counts =
      reinterpret_cast<device::ScanCounts*>(base + at.counts) + head * device::kMostScans;
  scratch.scanned = reinterpret_cast<uint32_t*>(base + at.scanned) + head * device::kMostScans;
  scratch.masses =
      reinterpret_cast<device::Mass*>(base + at.masses) + head * device::kSlices * shape.group;
  scratch.windows =
      reinterpret_cast<int*>(base + at.windows) + head * shape.group * device::kWindowRows;
  scratch.votes = reinterpret_cast<uint8_t*>(base + at.votes) +
                  head * call.searchers * shape.rotated_dim / kSubspaceDim * 256;
  scratch.candidates = reinterpret_cast<int32_t*>(base + at.candidates) + head * capacity;
  scratch.estimates =
      reinterpret_cast<float*>(base + at.estimates) + head * call.searchers * capacity;
  scratch.worth = reinterpret_cast<float*>(base + at.worth) + head * capacity;
  scratch.selected = reinterpret_cast<int32_t*>(base + at.selected) + head * at.selected_stride;
  scratch.addresses = reinterpret_cast<uint64_t*>(base + at.addresses) + head * at.selected_stride;
  scratch.fresh = reinterpret_cast<int32_t*>(base + at.fresh) + head * at.selected_stride;
  scratch.selected_count = reinterpret_cast<int32_t*>(base + at.selected_count) + head;
  scratch.candidate_count = reinterpret_cast<int32_t*>(base + at.candidate_count) + head;
  scratch.resident = reinterpret_cast<float*>(base + at.resident) + part;
  scratch.fetched = reinterpret_cast<float*>(base + at.fetched) + part;
  scratch.candidate_capacity = capacity;
  return scratch;
}

/** All but the scratch. */
template <typename Element>
__device__ inline void fill_context(const DecodeCall& call, const SequenceView& view, int row,
                                    int head, HeadContext& context) {
  const ModelShape& model = call.shape;
  context.row = row;
  context.head = head;
  context.rows = view.rows;
  context.total = int(view.total);
  context.searched = int(view.candidates);
  context.vote_ratio = view.vote_ratio;
  // As codec/key_statistics.h has them.
  const auto* numbers = static_cast<const int64_t*>(view.state);
  const int64_t* sums = numbers + 2 * model.kv_heads;
  const auto* counts = reinterpret_cast<const int32_t*>(sums + model.kv_heads * model.rotated_dim);
  context.statistics = {numbers + head, numbers + model.kv_heads + head,
                        sums + head * model.rotated_dim,
                        counts + head * (model.rotated_dim / kSubspaceDim) * 256};
  context.zone = {view.summaries,
                  {model.kv_heads, model.segment_tokens, model.rotated_dim / kSubspaceDim},
                  head,
                  int(view.zone_begin),
                  int(view.zone_end)};
  context.shape = {int(model.head_dim), int(model.group),
                   int(2 * model.head_dim * int64_t(sizeof(Element))), call.logits.scale,
                   call.logits.softcap};
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
  /** Where a position's row lies, in device or host memory. */
  __device__ __forceinline__ char* row_at(int position) const {
    const uint32_t tokens = uint32_t(call.shape.segment_tokens);
    const uint32_t segment = uint32_t(position) / tokens;
    const int64_t slot = uint32_t(position) - segment * tokens;
    return static_cast<char*>(context.rows[segment]) +
           (int64_t(context.head) * tokens + slot) * context.shape.row_bytes;
  }

  /** The rows of q that searchers stand for. */
  __device__ __forceinline__ auto rows_of_searchers() const {
    const int64_t first = int64_t(context.head) * context.shape.group;
    return [this, first](int searcher) {
      return device::QueryRows<Element>{at(call.q, first + searcher), call.q.stride_j,
                                        mean() ? context.shape.group : 1, mean(),
                                        context.shape.head_dim};
    };
  }
  /** Searchers from `from` on, as many as fit, for votes. All threads; ends with a barrier. */
  __device__ __forceinline__ void prepare_votes(int from, device::Queries<kWords>& out) const {
    device::prepare_queries<kWords, Element>(
        call.codec.negative, from, searchers(), rows_of_searchers(), [](int, const auto&) {}, out);
  }

  /** The same to be scored by signs: what `settle` needs. All threads; ends with a barrier. */
  __device__ __forceinline__ void prepare_signs(int from, device::Queries<kWords>& out) const {
    device::KnownStatistics<kWords> known;
    known.load(context.statistics);
    device::prepare_queries<kWords, Element>(
        call.codec.negative, from, searchers(), rows_of_searchers(),
        [&](int slot, const float (&x)[kWords]) {
          const double one = known.usable == 0 ? 0.0 : __ddiv_rn(1.0, double(known.usable));
          float step = 0;
          const device::QuerySums sums = device::quantise<kWords>(x, known, one, out, slot, step);
          if (device::lane_id() != 0) return;
          out.sum[slot] = sums.sum;
          out.scales[slot] = device::scale_of_zone(sums, known.usable, known.square_units, one,
                                                   step, call.logits.scale, 32 * kWords);
        },
        out);
  }

  /** Adds what heads find in their windows, a warp each. All threads; ends with a barrier. */
  __device__ __forceinline__ void add_windows(int from, device::Queries<kWords>& out) const {
    const int slot = device::warp_id();
    if (slot < min(searchers() - from, device::kQueries<kWords>)) {
      const int* rows = context.scratch.windows + (from + slot) * device::kWindowRows;
      const float seen = device::sum_window(rows, biases(from + slot));
      const float zone = out.scales[slot].total;
      const float most = seen > zone ? seen : zone, least = seen > zone ? zone : seen;
      const float total = __fadd_rn(most, device::rough_exp2(__fsub_rn(least, most)));
      __syncwarp();
      if (device::lane_id() == 0) out.scales[slot].total = total;
    }
    __syncthreads();
  }
};

/** A block's way from its index to its head: false when the lane is nobody's. All threads. */
template <typename Element>
__device__ __forceinline__ bool find_context(const DecodeCall& call, uint32_t index,
                                             HeadContext& context) {
  const uint32_t heads = uint32_t(call.shape.kv_heads), row = index / heads;
  const Lane lane = call.lanes[row];
  if (lane.layers == nullptr) return false;
  const int head = int(index - row * heads);
  // Two warps share the work, which is long for one thread.
  if (threadIdx.x == 0) {
    fill_context<Element>(call, lane.layers[call.layer], int(row), head, context);
  }
  if (threadIdx.x == 32) context.scratch = scratch_of(call, lane, head);
  return true;
}

}  // namespace pariskv::cuda
