// Exact logits of chosen rows, for explanations: the sums are the CPU's, bit for bit.
#include "elements.h"
#include "kernels.h"
#include "runtime.h"
#include "zone_row.cuh"

namespace pariskv::cuda {

namespace {

using namespace device;

constexpr int kThreads = 128;

/** One warp to a row and query head: lanes 0 to 15 are the sum's 16 lanes. */
template <typename Element>
__global__ void __launch_bounds__(kThreads) take_logits(ExactLogitsCall call) {
  const ModelShape& shape = call.shape;
  const int64_t i = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (i >= call.width) return;
  const int64_t query_head = blockIdx.y, head = query_head / shape.group;
  const int32_t position = call.positions[head * call.width + i];
  if (position < 0) return;
  const HeadRows<Element> rows(shape, *call.sequence, call.state, int(head), shape.narrows());
  const auto row = rows.row(position);
  const Element* query =
      reinterpret_cast<const Element*>(call.q.data) + query_head * call.q.stride_j;
  const int lane = int(threadIdx.x) % 32;
  float sum = 0;
  if (lane < 16) {
    for (int d = lane; d < int(shape.rows.key_dim); d += 16) {
      sum = fmaf(to_float(query[d]), rows.key_number(row, d), sum);
    }
  }
#pragma unroll
  for (int half = 8; half >= 1; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
  if (lane != 0) return;
  const float logit = sum * call.logits.scale, cap = call.logits.softcap;
  call.out[query_head * call.width + i] = cap > 0 ? cap * tanhf(logit / cap) : logit;
}

}  // namespace

void launch_exact_logits(const ExactLogitsCall& call, cudaStream_t stream) {
  if (call.width <= 0) return;
  const int64_t rows = kThreads / 32;
  const dim3 grid(unsigned((call.width + rows - 1) / rows), unsigned(call.shape.query_heads()));
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    take_logits<Element><<<grid, kThreads, 0, stream>>>(call);
  });
  check_launch("explain");
}

}  // namespace pariskv::cuda
