/**
 * attend_dense: attention to all rows of the sequences of a batch that are attended to in full. A
 * few blocks stay on each processor and take pieces of rows (work.cuh). The warps of a block take
 * tiles of a piece in turns (tile.cuh), each with copies of its next tiles on their way, from one
 * piece to the next without a pause. The block puts their sums of a piece together, and the warp
 * that leaves a query head's last piece puts all pieces of it together.
 */
#pragma once

#include <type_traits>

#include "pariskv/decode/attend/parts.cuh"
#include "pariskv/decode/context.cuh"
#include "pariskv/decode/dense/wide_tile.cuh"
#include "pariskv/decode/output.cuh"

namespace pariskv::cuda {

/** Tiles of a warp in shared memory: one at work, two on their way. */
constexpr int kDenseStages = 3;
/** Query heads of a kv head that share its rows. */
constexpr int kMostDenseHeads = 16;
/** 32 times as many dimensions of keys, and of values. */
constexpr int kMostDenseWords = 8;

template <int kWords>
struct DenseSpace {
  DenseWork work;
  float left[kDenseWarps][device::kDirectHeads][2 + 32 * kWords];  // by warps, of a piece
};

constexpr int dense_stage_bytes(int row_bytes) { return kDenseTile * dense_pitch(row_bytes); }

/**
 * @tparam kHeads  query heads of a kv head, at most: 4, 8 or 16
 * @tparam kExact  keys and values have 32 kWords dimensions
 */
template <typename Element, int kWords, int kHeads, bool kExact>
class AttendDense {
  using Reader = device::RowReader<Element>;
  using Space = DenseSpace<kWords>;
  using Tiles =
      std::conditional_t<kHeads == device::kDirectHeads, DenseTiles<Element, kWords, kExact>,
                         WideTiles<Element, kWords, kHeads, kExact>>;

 public:
  __device__ __forceinline__ AttendDense(const DenseParams& params, Space& space, char* stages)
      : params_(params),
        space_(space),
        shape_{int(params.call.shape.rows.key_dim), int(params.call.shape.rows.value_dim),
               int(params.call.shape.group),        int(params.call.shape.rows.bytes()),
               int(params.call.shape.rows.bytes()), params.call.logits.scale,
               params.call.logits.softcap},
        stages_(stages + device::warp_id() * kDenseStages * stage_bytes()) {}

  __device__ __forceinline__ void run() {
    space_.work.look_at(params_.call, params_.first, params_.count);
    if (blockIdx.x == 0 && device::warp_id() == 0) name_searched();
    const int64_t first = space_.work.stretch(int(blockIdx.x), int(gridDim.x));
    stop_ = space_.work.stretch(int(blockIdx.x) + 1, int(gridDim.x));
    DensePiece piece = space_.work.find(first, stop_);
    ahead_ = piece;
    ahead_row_ = piece.begin + kDenseTile * device::warp_id();
    skip_empty();
    for (int i = 0; i < kDenseStages - 1; ++i) issue();
    for (; piece.left; space_.work.advance(piece, stop_)) attend(piece);
    for (int s = int(blockIdx.x); s < params_.count; s += int(gridDim.x)) leave_if_idle(s);
  }

 private:
  /** A warp writes which sequences are searched, in order, and chooses what runs for so many. */
  __device__ __forceinline__ void name_searched() const {
    int32_t* const rows = params_.call.searched_rows;
    const int lane = device::lane_id();
    int named = 0;
    for (int first = 0; first < params_.count; first += 32) {
      const int s = first + lane;
      const bool searched = s < params_.count && space_.work.searched(s);
      const uint32_t all = __ballot_sync(~0u, searched);
      if (searched && rows != nullptr) rows[named + __popc(all & ((1u << lane) - 1))] = s;
      named += __popc(all);
    }
    if (rows != nullptr) {
      for (int s = named + lane; s < params_.count; s += 32) rows[s] = -1;
    }
    const DenseChoice& choice = params_.choice;
    if (choice.condition == 0 || named == 0 || lane > 0) return;
    int chosen = 0;
    while (chosen + 1 < choice.count && named <= choice.room[chosen + 1]) ++chosen;
    device::ptx::set_condition(choice.condition, choice.count == 1 ? 1 : chosen);
  }

  /** Blocks take turns with the slots that are idle. */
  __device__ __forceinline__ void leave_if_idle(int sequence) const {
    const DecodeCall& call = params_.call;
    const int64_t row = params_.first + sequence;
    if (call.slots[row].layers != nullptr) return;
    const int kv_heads = int(call.shape.kv_heads);
    leave_idle<Element>(call, row, 0, kv_heads * shape_.group);
    if (call.error == nullptr) return;
    for (int h = int(threadIdx.x); h < kv_heads; h += kDenseThreads) {
      call.error[row * call.error_stride + h] = 0;
    }
  }

  static constexpr int kTurn = kDenseWarps * kDenseTile;
  static constexpr int kExactBytes = 2 * 32 * kWords * int(sizeof(Element));

  __device__ __forceinline__ int row_bytes() const {
    return kExact ? kExactBytes : shape_.row_bytes;
  }
  __device__ __forceinline__ int pitch() const { return dense_pitch(row_bytes()); }
  __device__ __forceinline__ int stage_bytes() const { return dense_stage_bytes(row_bytes()); }
  __device__ __forceinline__ int value_dim() const {
    return kExact ? 32 * kWords : shape_.value_dim;
  }

  __device__ __forceinline__ bool has_new_row() const { return params_.call.k.data != nullptr; }
  __device__ __forceinline__ Element* at(const Rows& tensor, int sequence, int64_t j) const {
    return reinterpret_cast<Element*>(tensor.data) + (params_.first + sequence) * tensor.stride_i +
           j * tensor.stride_j;
  }

  /** From behind the tiles of a piece to one that this warp has, if any is left. */
  __device__ __forceinline__ void skip_empty() {
    while (ahead_.left && ahead_row_ >= ahead_.end) {
      space_.work.advance(ahead_, stop_);
      ahead_row_ = ahead_.begin + kDenseTile * device::warp_id();
    }
  }

  /** Where a row of the tile that sets out lies. */
  __device__ __forceinline__ char* stored(int position) const {
    return device::row_of(space_.work.segments(ahead_.sequence), params_.by_segment, tokens(),
                          ahead_.head, position, row_bytes());
  }
  __device__ __forceinline__ int tokens() const { return int(params_.call.shape.segment_tokens); }

  /** The next tile sets out; a group of copies whether there is one or not. */
  __device__ __forceinline__ void issue() {
    if (ahead_.left) {
      char* stage = stages_ + issued_ % kDenseStages * stage_bytes();
      const int total = space_.work.total(ahead_.sequence);
      const bool fresh = has_new_row() && ahead_row_ + kDenseTile >= total;
      if (kExact && !fresh && ahead_row_ + kDenseTile <= ahead_.end && tokens() % kDenseTile == 0) {
        copy_tile(stage);
      } else {
        copy_rows(stage, fresh ? total - 1 - ahead_row_ : kDenseTile);
      }
      ahead_row_ += kTurn;
      skip_empty();
    }
    ++issued_;
    device::ptx::cp_async_commit_group();
  }

  /** Rows of one segment, all there. */
  __device__ __forceinline__ void copy_tile(char* stage) {
    const int segment = int(params_.by_segment(ahead_row_));
    if (ahead_.sequence != segment_sequence_ || segment != segment_) {
      segment_sequence_ = ahead_.sequence, segment_ = segment;
      segment_rows_ = static_cast<const char*>(space_.work.segments(ahead_.sequence)[segment]);
    }
    constexpr int kVectors = kExactBytes / 16, kAtOnce = kVectors < 32 ? 32 / kVectors : 1;
    constexpr int kPitch = dense_pitch(kExactBytes);
    const int lane = device::lane_id(), row = lane / kVectors, vector = lane % kVectors;
    const char* from = device::row_of_segment(segment_rows_, ahead_.head, tokens(),
                                              ahead_row_ - segment * tokens() + row, kExactBytes) +
                       16 * vector;
    const uint32_t to = device::shared_address(stage) + uint32_t(row * kPitch + 16 * vector);
#pragma unroll
    for (int r = 0; r < kDenseTile; r += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kExactBytes; i += 32 * 16) {
        device::ptx::cp_async_cg_16_in_lines(to + uint32_t(r * kPitch + i),
                                             from + r * kExactBytes + i);
      }
    }
  }

  /** Rows one by one, zeros where there are none, but for the token's own. */
  __device__ __forceinline__ void copy_rows(char* stage, int fresh) const {
    const int lane = device::lane_id();
    const char* any = stored(ahead_row_);
    const uint32_t target = device::shared_address(stage);
#pragma unroll 1
    for (int r = 0; r < kDenseTile; ++r) {
      if (r == fresh) continue;
      const bool there = ahead_row_ + r < ahead_.end;
      const char* from = there ? stored(ahead_row_ + r) : any;
      for (int i = 16 * lane; i < row_bytes(); i += 32 * 16) {
        device::ptx::cp_async_cg_16(target + uint32_t(r * pitch() + i), from + i, there);
      }
    }
    if (fresh < kDenseTile) store_new_row(stage + fresh * pitch(), stored(ahead_row_ + fresh));
  }

  /** The token's own row goes to its place in the store and among the rows of the tile. */
  __device__ __forceinline__ void store_new_row(char* staged, char* row) const {
    const Element* k = at(params_.call.k, ahead_.sequence, ahead_.head);
    const Element* v = at(params_.call.v, ahead_.sequence, ahead_.head);
    for (char* to : {staged, row}) {
      Reader::write(to, k, shape_.key_dim, v, shape_.value_dim, device::lane_id(), 32);
    }
  }

  /** Floats that are left of a query head. */
  __device__ __forceinline__ int left_floats() const { return 2 + value_dim(); }

  __device__ __forceinline__ void attend(const DensePiece& piece) {
    if (piece.sequence != sequence_ || piece.head != head_) {
      const Element* q = at(params_.call.q, piece.sequence, int64_t(piece.head) * shape_.group);
      tiles_.start(q, params_.call.q.stride_j, shape_.group, shape_);
    }
    tiles_.begin();
    sequence_ = piece.sequence, head_ = piece.head;
#pragma unroll 1
    for (int row = piece.begin + kDenseTile * device::warp_id(); row < piece.end; row += kTurn) {
      __syncwarp();  // the stage that is filled next has been read
      issue();
      device::ptx::cp_async_wait_group<kDenseStages - 1>();
      __syncwarp();
      const char* stage = stages_ + used_++ % kDenseStages * stage_bytes();
      tiles_.add(device::shared_address(stage), pitch(), piece.end - row, shape_);
    }
    leave(piece);
  }

  /** The piece's share of each query head: to its part in scratch, or to the output. */
  __device__ __forceinline__ void leave(const DensePiece& piece) {
    const int total = space_.work.total(piece.sequence), rows = piece_rows(total);
    const int pieces = (total + rows - 1) / rows, warp = device::warp_id();
    const ParisKVSlot& slot = params_.call.slots[params_.first + piece.sequence];
    const auto in_scratch = [&](auto* of_first_head) {
      return reinterpret_cast<decltype(of_first_head)>(reinterpret_cast<uint64_t>(of_first_head) +
                                                       uint64_t(piece.head * slot.head_bytes));
    };
    float* parts = in_scratch(slot.scratch.resident);
    if (params_.call.error != nullptr && piece.begin == 0 && threadIdx.x == 0) {
      params_.call
          .error[(params_.first + piece.sequence) * params_.call.error_stride + piece.head] =
          0;  // all rows are attended to
    }
#pragma unroll 1
    for (int first = 0; first < kHeads; first += device::kDirectHeads) {
      const int heads = min(device::kDirectHeads, shape_.group - first), head = first + warp;
      if (heads <= 0) break;
      __syncthreads();  // the last piece's sums have been read
      tiles_.leave(space_.left[warp][0], 2 + 32 * kWords, first, heads, shape_);
      __syncthreads();
      if (warp >= heads) continue;
      if (pieces == 1) {
        put_together(piece, head, nullptr);
        continue;
      }
      const int64_t part = int64_t(piece.begin / rows) * shape_.group + head;
      put_together(piece, head, parts + part * left_floats());
      if (ends_last(in_scratch(slot.scratch.pieces_ended) + head, pieces)) {
        join_pieces(piece, head, parts + head * left_floats(), pieces);
      }
    }
  }

  /** A warp has left its part of a query head: whether that was the last one. */
  static __device__ __forceinline__ bool ends_last(uint32_t* ended, int pieces) {
    bool last = false;
    __syncwarp();
    if (device::lane_id() == 0) {
      // A warp that sees this count sees the part as well.
      __threadfence();
      last = int(atomicAdd(ended, 1u)) == pieces - 1;
      if (last) *ended = 0;
      __threadfence();
    }
    return __shfl_sync(~0u, last, 0);
  }

  /** A warp adds up all warps' sums of one query head. */
  __device__ __forceinline__ void put_together(const DensePiece& piece, int head, float* part) {
    static_assert(device::kDirectHeads == kDenseWarps);
    const int lane = device::lane_id(), warp = device::warp_id();
    float top = -device::infinity(), sum = 0, factors[kDenseWarps];
#pragma unroll
    for (int w = 0; w < kDenseWarps; ++w) top = fmaxf(top, space_.left[w][warp][0]);
#pragma unroll
    for (int w = 0; w < kDenseWarps; ++w) {
      const float* own = space_.left[w][warp];
      factors[w] = own[0] == -device::infinity() ? 0.0f : device::exp_of(own[0] - top);
      sum = __fmaf_rn(own[1], factors[w], sum);
    }
    const Output<Element> output{params_.call, params_.first + piece.sequence,
                                 int64_t(piece.head) * shape_.group + head};
    const float share = part == nullptr ? output.share_of(top, sum, lane == 0) : 0;
    for (int d = lane; d < value_dim(); d += 32) {
      float weighted = 0;
#pragma unroll
      for (int w = 0; w < kDenseWarps; ++w) {
        weighted = __fmaf_rn(factors[w], space_.left[w][warp][2 + d], weighted);
      }
      if (part == nullptr) {
        output.give(d, weighted * share);
      } else {
        __stcg(part + 2 + d, weighted);
      }
    }
    if (part != nullptr && lane < 2) __stcg(part + lane, lane == 0 ? top : sum);
  }

  /** A warp adds up the pieces of one query head. */
  __device__ __forceinline__ void join_pieces(const DensePiece& piece, int head, const float* parts,
                                              int pieces) const {
    const int lane = device::lane_id();
    const int64_t step = int64_t(shape_.group) * left_floats();
    const bool has = lane < pieces;
    const float maximum = has ? __ldcg(parts + lane * step) : -device::infinity();
    const float own_sum = has ? __ldcg(parts + lane * step + 1) : 0;
    const device::PartFactors all =
        device::combine_parts(maximum, own_sum, -device::infinity(), 0, 0);
    const Output<Element> output{params_.call, params_.first + piece.sequence,
                                 int64_t(piece.head) * shape_.group + head};
    const float share = output.share_of(all.maximum, all.sum, lane == 0);
#pragma unroll 2
    for (int first = 0; first < value_dim(); first += 64) {
      const int d = first + 2 * lane;
      float2 values[device::kParts] = {}, weighted{};
#pragma unroll
      for (int p = 0; p < device::kParts; ++p) {
        if (p < pieces && d < value_dim()) {
          values[p] = __ldcg(reinterpret_cast<const float2*>(parts + p * step + 2 + d));
        }
      }
#pragma unroll
      for (int p = 0; p < device::kParts; ++p) {
        const float factor = __shfl_sync(~0u, all.factor, p);
        weighted.x = __fmaf_rn(factor, values[p].x, weighted.x);
        weighted.y = __fmaf_rn(factor, values[p].y, weighted.y);
      }
      if (d >= value_dim()) continue;
      output.give(d, weighted.x * share);
      output.give(d + 1, weighted.y * share);
    }
  }

  const DenseParams& params_;
  Space& space_;
  const device::AttendShape shape_;
  char* const stages_;  // of this warp
  int64_t stop_ = 0;    // the row of all that the next block begins with
  DensePiece ahead_{};  // the piece of the tile that sets out next
  int ahead_row_ = 0;
  int segment_sequence_ = -1, segment_ = -1;  // the last one of a tile
  const char* segment_rows_ = nullptr;
  int issued_ = 0, used_ = 0;
  int sequence_ = -1, head_ = -1;  // of the queries in registers
  Tiles tiles_;
};

/** Blocks of a processor: two, but of rows that are too long for that. */
template <int kWords>
constexpr int kDenseBlocks = kWords > 4 ? 1 : 2;

template <typename Element, int kWords, int kHeads, bool kExact>
__global__ void __launch_bounds__(kDenseThreads, kDenseBlocks<kWords>)
    attend_dense_kernel(const __grid_constant__ DenseParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<DenseSpace<kWords>*>(shared);
  constexpr int kSpace = (int(sizeof space) + 127) / 128 * 128;
  AttendDense<Element, kWords, kHeads, kExact>(params, space,
                                               reinterpret_cast<char*>(shared) + kSpace)
      .run();
}

}  // namespace pariskv::cuda
