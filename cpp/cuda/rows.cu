// Rows in and out of the store, as fast as memory copies.
#include <algorithm>
#include <cstdint>

#include "device/stored_rows.cuh"
#include "kernels.h"
#include "runtime.h"
#include "tuning.h"

namespace pariskv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // loads of a thread before its first store

struct RowsParameters {
  const SequenceView* sequence;
  uint32_t begin;
  uint32_t segment_tokens;
  uint32_t heads;
  uint32_t key, value;  // pieces of a K and of a V
  uint32_t pairs;       // tokens times heads
  Rows k, v;            // strides in pieces
};

/** One piece of the K and V of a token and head, walked in steps of the whole grid. */
struct Walk {
  uint32_t pair, piece, pair_step, piece_step, row;

  __device__ __forceinline__ explicit Walk(uint32_t pieces) : row(pieces) {
    const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
    pair = first / row, piece = first % row;
    pair_step = step / row, piece_step = step % row;
  }
  __device__ __forceinline__ void advance() {
    pair += pair_step;
    piece += piece_step;
    if (piece >= row) piece -= row, ++pair;
  }
};

/**
 * Moves pieces, 16 bytes or one element each, between packed tensors and the store. Pieces are
 * taken as they lie in the packed tensors, so that both sides see runs of whole rows.
 */
template <typename Piece, bool kAppend>
__global__ void __launch_bounds__(kThreads) move_rows(RowsParameters p) {
  const uint32_t row = p.key + p.value;
  Walk walk(row);
  while (walk.pair < p.pairs) {
    Piece values[kInFlight];
    Piece* targets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, walk.advance()) {
      targets[i] = nullptr;
      if (walk.pair >= p.pairs) continue;
      const uint32_t token = walk.pair / p.heads, head = walk.pair - token * p.heads;
      const bool key = walk.piece < p.key;
      const Rows& packed = key ? p.k : p.v;
      Piece* outside = reinterpret_cast<Piece*>(packed.data) + token * packed.stride_i +
                       head * packed.stride_j + (key ? walk.piece : walk.piece - p.key);
      const uint32_t position = p.begin + token, segment = position / p.segment_tokens;
      // In pieces, as all sizes here are.
      Piece* inside =
          device::row_of_segment(static_cast<Piece*>(p.sequence->rows[segment]), int(head),
                                 p.segment_tokens, position - segment * p.segment_tokens, row) +
          walk.piece;
      values[i] = kAppend ? *outside : *inside;
      targets[i] = kAppend ? inside : outside;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (targets[i] != nullptr) *targets[i] = values[i];
    }
  }
}

template <typename Piece, bool kAppend>
void launch(const RowsCall& call, cudaStream_t stream) {
  const int64_t size = size_of(call.shape.dtype), elements = int64_t(sizeof(Piece)) / size;
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "rows");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "rows");
  const int64_t most_blocks = int64_t(processors) * tuning_of(device).rows_per_sm;
  const int64_t heads = call.shape.kv_heads;
  const int64_t key = call.shape.rows.key_dim / elements;
  const int64_t value = call.shape.rows.value_dim / elements;
  const int64_t most = (int64_t{1} << 31) / heads;  // tokens of a launch: pairs fit 32 bits
  for (int64_t first = 0; first < call.tokens; first += most) {
    const int64_t tokens = std::min(most, call.tokens - first);
    const auto in_pieces = [&](const Rows& rows) {
      return Rows{rows.data + first * rows.stride_i * size, rows.stride_i / elements,
                  rows.stride_j / elements};
    };
    const RowsParameters p{call.sequence,
                           uint32_t(call.begin + first),
                           uint32_t(call.shape.segment_tokens),
                           uint32_t(heads),
                           uint32_t(key),
                           uint32_t(value),
                           uint32_t(tokens * heads),
                           in_pieces(call.k),
                           in_pieces(call.v)};
    const int64_t each = kThreads * kInFlight;
    const int64_t needed = (tokens * heads * (key + value) + each - 1) / each;
    const unsigned blocks = unsigned(std::min(needed, most_blocks));
    move_rows<Piece, kAppend><<<blocks, kThreads, 0, stream>>>(p);
    check_launch(kAppend ? "append" : "read");
  }
}

/** Whether all rows of a tensor start at multiples of 16 bytes. */
bool aligned(const Rows& rows, int64_t size) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_i * size % 16 == 0 &&
         rows.stride_j * size % 16 == 0;
}

template <bool kAppend>
void launch(const RowsCall& call, cudaStream_t stream) {
  if (call.tokens <= 0) return;
  const int64_t size = size_of(call.shape.dtype);
  if (aligned(call.k, size) && aligned(call.v, size)) return launch<uint4, kAppend>(call, stream);
  if (size == 4) return launch<uint32_t, kAppend>(call, stream);
  launch<uint16_t, kAppend>(call, stream);
}

}  // namespace

void launch_append(const RowsCall& call, cudaStream_t stream) { launch<true>(call, stream); }

void launch_read(const RowsCall& call, cudaStream_t stream) { launch<false>(call, stream); }

}  // namespace pariskv::cuda
