// Rows in and out of the store, as fast as memory copies.
#include <algorithm>
#include <cstdint>

#include "device/stored_rows.cuh"
#include "kernels.h"
#include "page_rows.cuh"
#include "runtime.h"
#include "tuning.h"

namespace pariskv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // loads of a thread before its first store

constexpr int kMostItems = 128;  // of a launch; they travel along

struct RowsParameters {
  uint32_t segment_tokens;
  uint32_t heads;
  uint32_t key, value;  // pieces of a K and of a V
  uint32_t pairs;       // tokens times heads
  uint32_t movers;      // blocks that move rows; one for each item fills a page table behind them
  uint32_t count;
  Rows k, v;  // strides in pieces
  PageFill fill;
  struct Item {
    const SequenceView* sequence;
    uint32_t begin, first;  // position, and place among the tokens of the launch
    int32_t page_row;
  } item[kMostItems];
};
static_assert(sizeof(RowsParameters) <= 4096);

/** One piece of the K and V of a token and head, walked in steps of the whole grid. */
struct Walk {
  uint32_t pair, piece, pair_step, piece_step, row;

  __device__ __forceinline__ Walk(uint32_t pieces, uint32_t blocks) : row(pieces) {
    const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = blocks * kThreads;
    pair = first / row, piece = first % row;
    pair_step = step / row, piece_step = step % row;
  }
  __device__ __forceinline__ void advance() {
    pair += pair_step;
    piece += piece_step;
    if (piece >= row) piece -= row, ++pair;
  }
};

/** A block of threads: the pages of a sequence, in its row of the table. */
__device__ __forceinline__ void fill_pages(const RowsParameters& p, uint32_t number) {
  const RowsParameters::Item& item = p.item[number];
  const uint32_t next = number + 1 < p.count ? p.item[number + 1].first : p.pairs / p.heads;
  const int64_t total = int64_t(item.begin) + next - item.first;
  const bool served = item.page_row >= 0;
  const int64_t row = served ? item.page_row : ~item.page_row;
  const bool filled = served && device::fill_page_row(p.fill, row, total, p.segment_tokens,
                                                      item.sequence->rows, kThreads);
  if (threadIdx.x == 0) p.fill.lengths[row] = filled ? int32_t(total) : 0;
}

/**
 * Moves pieces, 16 bytes or one element each, between packed tensors and the store. Pieces are
 * taken as they lie in the packed tensors, so that both sides see runs of whole rows.
 */
template <typename Piece, bool kAppend>
__global__ void __launch_bounds__(kThreads) move_rows(const __grid_constant__ RowsParameters p) {
  if (blockIdx.x >= p.movers) return fill_pages(p, blockIdx.x - p.movers);
  const uint32_t row = p.key + p.value;
  Walk walk(row, p.movers);
  uint32_t own = 0;  // the item of a token
  while (walk.pair < p.pairs) {
    Piece values[kInFlight];
    Piece* targets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, walk.advance()) {
      targets[i] = nullptr;
      if (walk.pair >= p.pairs) continue;
      const uint32_t token = walk.pair / p.heads, head = walk.pair - token * p.heads;
      while (own + 1 < p.count && token >= p.item[own + 1].first) ++own;
      const bool key = walk.piece < p.key;
      const Rows& packed = key ? p.k : p.v;
      Piece* outside = reinterpret_cast<Piece*>(packed.data) + token * packed.stride_i +
                       head * packed.stride_j + (key ? walk.piece : walk.piece - p.key);
      const uint32_t position = p.item[own].begin + (token - p.item[own].first);
      const uint32_t segment = position / p.segment_tokens;
      // In pieces, as all sizes here are.
      Piece* inside = device::row_of_segment(
                          static_cast<Piece*>(p.item[own].sequence->rows[segment]), int(head),
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

/** Launches of some items at a time, and of as many tokens as 32 bits can count pieces of. */
template <typename Visit>
void each_launch(const RowsCall& call, Visit visit) {
  const int64_t most = (int64_t{1} << 31) / call.shape.kv_heads;
  RowsParameters p{};
  int64_t first = 0, tokens = 0;
  const auto finish = [&] {
    if (p.count > 0) visit(p, first, tokens);
    first += tokens, tokens = 0, p.count = 0;
  };
  for (int64_t i = 0; i < call.count; ++i) {
    const RowsItem& item = call.items[i];
    for (int64_t done = 0; done < item.tokens;) {
      if (p.count == kMostItems || tokens == most) finish();
      const int64_t own = std::min(item.tokens - done, most - tokens);
      p.item[p.count++] = {item.sequence, uint32_t(item.begin + done), uint32_t(tokens),
                           item.page_row};
      done += own, tokens += own;
    }
  }
  finish();
}

template <typename Piece, bool kAppend>
void launch(const RowsCall& call, cudaStream_t stream) {
  const int64_t size = size_of(call.shape.dtype), elements = int64_t(sizeof(Piece)) / size;
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "rows");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "rows");
  const int64_t most_blocks = int64_t(processors) * tuning_of(device).rows_per_sm;
  const int64_t heads = call.shape.kv_heads;
  each_launch(call, [&](RowsParameters& p, int64_t first, int64_t tokens) {
    const auto in_pieces = [&](const Rows& rows) {
      return Rows{rows.data + first * rows.stride_i * size, rows.stride_i / elements,
                  rows.stride_j / elements};
    };
    p.segment_tokens = uint32_t(call.shape.segment_tokens);
    p.heads = uint32_t(heads), p.pairs = uint32_t(tokens * heads);
    p.key = uint32_t(call.shape.rows.key_dim / elements);
    p.value = uint32_t(call.shape.rows.value_dim / elements);
    p.k = in_pieces(call.k), p.v = in_pieces(call.v);
    p.fill = call.fill;
    const int64_t each = kThreads * kInFlight;
    const int64_t needed = (int64_t(p.pairs) * (p.key + p.value) + each - 1) / each;
    p.movers = uint32_t(std::min(needed, most_blocks));
    const unsigned fillers = p.fill.first == nullptr ? 0 : p.count;
    move_rows<Piece, kAppend><<<p.movers + fillers, kThreads, 0, stream>>>(p);
    check_launch(kAppend ? "append" : "read");
  });
}

/** Whether all rows of a tensor start at multiples of 16 bytes. */
bool aligned(const Rows& rows, int64_t size) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_i * size % 16 == 0 &&
         rows.stride_j * size % 16 == 0;
}

template <bool kAppend>
void launch(const RowsCall& call, cudaStream_t stream) {
  const int64_t size = size_of(call.shape.dtype);
  if (aligned(call.k, size) && aligned(call.v, size)) return launch<uint4, kAppend>(call, stream);
  if (size == 4) return launch<uint32_t, kAppend>(call, stream);
  launch<uint16_t, kAppend>(call, stream);
}

/** Lengths of rows of a page table. */
struct LengthsParameters {
  static constexpr int kMost = 500;
  int32_t* lengths;
  int32_t count;
  int32_t row[kMost], value[kMost];
};
static_assert(sizeof(LengthsParameters) <= 4096);

__global__ void set_lengths(const __grid_constant__ LengthsParameters p) {
  const int i = int(threadIdx.x);
  if (i < p.count) p.lengths[p.row[i]] = p.value[i];
}

}  // namespace

void launch_set_lengths(int32_t* lengths, const int32_t* rows, const int32_t* values, int64_t count,
                        cudaStream_t stream) {
  LengthsParameters p;
  p.lengths = lengths;
  for (int64_t first = 0; first < count; first += p.count) {
    p.count = int32_t(std::min<int64_t>(count - first, p.kMost));
    for (int i = 0; i < p.count; ++i) {
      p.row[i] = rows == nullptr ? int32_t(first) + i : rows[first + i];
      p.value[i] = values[first + i];
    }
    set_lengths<<<1, 512, 0, stream>>>(p);
    check_launch("set lengths");
  }
}

void launch_append(const RowsCall& call, cudaStream_t stream) { launch<true>(call, stream); }

void launch_read(const RowsCall& call, cudaStream_t stream) { launch<false>(call, stream); }

}  // namespace pariskv::cuda
