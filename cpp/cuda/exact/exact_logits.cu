// Exact logits of chosen rows, for explanations: the sums are the CPU's, bit for bit.
#include "device/narrow_rows.cuh"
#include "elements.h"
#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr int kThreads = 128;

struct LogitsParameters {
  const SequenceView* sequence;
  int64_t segment_tokens;
  int32_t group;
  int32_t key_dim;
  int32_t row_bytes;
  Rows q;
  float scale, softcap;
  const int32_t* positions;
  int64_t width;
  float* out;
};

/** One warp to a row and query head: lanes 0 to 15 are the sum's 16 lanes. */
template <typename Element, typename Reader>
__global__ void __launch_bounds__(kThreads) take_logits(LogitsParameters p) {
  const int64_t i = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (i >= p.width) return;
  const int64_t query_head = blockIdx.y, head = query_head / p.group;
  const int32_t position = p.positions[head * p.width + i];
  if (position < 0) return;
  const int64_t segment = position / p.segment_tokens, slot = position % p.segment_tokens;
  void* const* table = Reader::kScaled ? p.sequence->narrow_rows : p.sequence->rows;
  const char* key = row_of_segment(static_cast<const char*>(table[segment]), int(head),
                                   p.segment_tokens, slot, p.row_bytes);
  const Element* query = reinterpret_cast<const Element*>(p.q.data) + query_head * p.q.stride_j;
  const int lane = int(threadIdx.x) % 32;
  float sum = 0;
  if (lane < 16) {
    for (int d = lane; d < p.key_dim; d += 16) {
      sum = fmaf(to_float(query[d]), Reader::number(key, d, p.key_dim), sum);
    }
  }
#pragma unroll
  for (int half = 8; half >= 1; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
  if (lane != 0) return;
  const float logit = sum * p.scale;
  p.out[query_head * p.width + i] = p.softcap > 0 ? p.softcap * tanhf(logit / p.softcap) : logit;
}

template <typename Element, typename Reader>
void launch(const ExactLogitsCall& call, cudaStream_t stream) {
  const ModelShape& shape = call.shape;
  const LogitsParameters p{call.sequence,
                           shape.segment_tokens,
                           int32_t(shape.group),
                           int32_t(shape.rows.key_dim),
                           int32_t(shape.zone_rows().bytes()),
                           call.q,
                           call.logits.scale,
                           call.logits.softcap,
                           call.positions,
                           call.width,
                           call.out};
  const int64_t rows = kThreads / 32;
  const dim3 grid(unsigned((call.width + rows - 1) / rows), unsigned(shape.query_heads()));
  take_logits<Element, Reader><<<grid, kThreads, 0, stream>>>(p);
  check_launch("explain");
}

}  // namespace

void launch_exact_logits(const ExactLogitsCall& call, cudaStream_t stream) {
  if (call.width <= 0) return;
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    call.shape.narrows() ? launch<Element, NarrowReader<Element>>(call, stream)
                         : launch<Element, RowReader<Element>>(call, stream);
  });
}

}  // namespace pariskv::cuda
