// What a step does beside kernels that read pages: it stores the new rows of the sequences that
// those attend to, tells them their pages, and names the other sequences.
#include <cstdint>

#include "device/ptx.cuh"
#include "device/stored_rows.cuh"
#include "device/warp.cuh"
#include "kernels.h"
#include "launch.h"
#include "page_rows.cuh"
#include "pariskv/decode/params.h"

namespace pariskv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostOfThread = int(kMostNamed) / kThreads;

__device__ __forceinline__ int64_t page_row(const PagedStepParams& p, int slot) {
  return p.page_rows == nullptr ? slot : p.page_rows[slot];
}

/** A block of threads: a sequence that pages serve. */
template <typename Piece>
__device__ __forceinline__ void serve(const PagedStepParams& p, int s) {
  const ParisKVSlot& slot = p.slots[s];
  const int64_t row = page_row(p, s);
  const int tokens = p.fill.lengths[row];
  if (slot.layers == nullptr || tokens <= 0) return;
  const SequenceView& view = slot.layers[p.layer];
  device::fill_page_row(p.fill, row, tokens, p.segment_tokens, view.rows, kThreads);
  if (p.k.data == nullptr) return;
  const uint32_t pieces = p.key + p.value, position = uint32_t(tokens) - 1;
  const uint32_t segment = position / p.segment_tokens;
  auto* const rows = static_cast<Piece*>(view.rows[segment]);
  for (uint32_t i = threadIdx.x; i < p.heads * pieces; i += kThreads) {
    const uint32_t head = i / pieces, piece = i - head * pieces;
    const bool key = piece < p.key;
    const Rows& packed = key ? p.k : p.v;
    const Piece* from = reinterpret_cast<const Piece*>(packed.data) + s * packed.stride_i +
                        head * packed.stride_j + (key ? piece : piece - p.key);
    device::row_of_segment(rows, int(head), p.segment_tokens, position - segment * p.segment_tokens,
                           pieces)[piece] = *from;
  }
}

/** A block of threads: the sequences that pages do not serve, in order, and what runs for them. */
__device__ __forceinline__ void name_others(const PagedStepParams& p) {
  __shared__ int before_warp[kThreads / 32 + 1];
  const int thread = int(threadIdx.x), each = (p.batch + kThreads - 1) / kThreads;
  const int first = thread * each;
  uint32_t own = 0;  // a bit for each of its slots
  for (int i = 0; i < each; ++i) {
    const int s = first + i;
    if (s >= p.batch || p.slots[s].layers == nullptr) continue;
    if (p.fill.lengths[page_row(p, s)] <= 0) own |= 1u << i;
  }
  int before = __popc(own);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (device::lane_id() >= step) before += other;
  }
  if (device::lane_id() == 31) before_warp[device::warp_id() + 1] = before;
  if (thread == 0) before_warp[0] = 0;
  __syncthreads();
  if (thread == 0) {
    for (int w = 0; w < kThreads / 32; ++w) before_warp[w + 1] += before_warp[w];
  }
  __syncthreads();
  const int all = before_warp[kThreads / 32];
  int at = before_warp[device::warp_id()] + before - __popc(own);
  for (int i = 0; i < each; ++i) {
    if (own >> i & 1) p.named[at++] = first + i;
  }
  for (int i = all + thread; i < p.batch; i += kThreads) p.named[i] = -1;
  if (thread > 0 || p.choice.condition == 0 || all == 0) return;
  int chosen = 0;
  while (chosen + 1 < p.choice.count && all <= p.choice.room[chosen + 1]) ++chosen;
  device::ptx::set_condition(p.choice.condition, p.choice.count == 1 ? 1 : chosen);
}

}  // namespace

template <typename Piece>
__global__ void __launch_bounds__(kThreads)
    begin_paged_step(const __grid_constant__ PagedStepParams p) {
  if (int(blockIdx.x) == p.batch) return name_others(p);
  serve<Piece>(p, int(blockIdx.x));
}
namespace {

static_assert(kMostOfThread <= 32);

template <typename Piece>
void launch(const DecodeCall& call, const PageFill& fill, const int32_t* page_rows,
            const DenseChoice& choice, cudaStream_t stream) {
  const int64_t elements = int64_t(sizeof(Piece)) / size_of(call.shape.dtype);
  const auto in_pieces = [&](const Rows& rows) {
    return Rows{rows.data, rows.stride_i / elements, rows.stride_j / elements};
  };
  const PagedStepParams p{call.slots,
                          int32_t(call.layer),
                          int32_t(call.batch),
                          uint32_t(call.shape.segment_tokens),
                          uint32_t(call.shape.kv_heads),
                          uint32_t(call.shape.rows.key_dim / elements),
                          uint32_t(call.shape.rows.value_dim / elements),
                          in_pieces(call.k),
                          in_pieces(call.v),
                          fill,
                          page_rows,
                          call.searched_rows,
                          choice};
  const Kernel<PagedStepParams> kernel = begin_paged_step<Piece>;
  Launch(call.batch + 1, 0, stream, kThreads).run(kernel, p, "decode: begin_paged_step");
}

}  // namespace

void launch_paged_step(const DecodeCall& call, const PageFill& fill, const int32_t* page_rows,
                       const DenseChoice& choice, cudaStream_t stream) {
  const int64_t size = size_of(call.shape.dtype);
  const auto in_pieces = [&](const Rows& rows) {
    return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride_i * size % 16 == 0 &&
           rows.stride_j * size % 16 == 0;
  };
  const bool whole =
      call.shape.rows.key_dim * size % 16 == 0 && call.shape.rows.value_dim * size % 16 == 0;
  if (whole && in_pieces(call.k) && in_pieces(call.v)) {
    return launch<uint4>(call, fill, page_rows, choice, stream);
  }
  if (size == 4) return launch<uint32_t>(call, fill, page_rows, choice, stream);
  launch<uint16_t>(call, fill, page_rows, choice, stream);
}

}  // namespace pariskv::cuda
