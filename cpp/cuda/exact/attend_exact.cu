// Exact causal attention of a sequence's last tokens.
//
// A block holds its queries and walks over its share of the rows that they see. So rows are read
// once for every 128 queries of a kv head (32 in 32 bits), wherever they lie. exact_attention.h
// says who cuts an attention into launches.
#include <algorithm>

#include "elements.h"
#include "exact/attend_exact.h"
#include "exact/running_softmax.cuh"
#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

extern template ExactKernel exact_kernel<float>(const RowFormat&);
extern template ExactKernel exact_kernel<__half>(const RowFormat&);
extern template ExactKernel exact_kernel<__nv_bfloat16>(const RowFormat&);

namespace {

using namespace device;

/**
 * Of a warpgroup; with fewer in the whole call, most of its products would be idle. Part of the
 * result: the kernel for many queries sums in another order.
 */
constexpr int64_t kManyQueries = 64;

ExactKernel kernel_of(const ModelShape& shape) {
  return dispatch_element(
      shape.dtype, [&](auto element) { return exact_kernel<decltype(element)>(shape.rows); });
}
/** The same for all parts of a call, so that it makes no difference how it is cut. */
ExactKernel kernel_of(const AttendExactCall& call) {
#ifdef PARISKV_HOPPER
  if (call.call_tokens * call.shape.group >= kManyQueries) {
    const ExactKernel kernel = hopper_kernel_of(call.shape.rows, call.precision);
    if (kernel.address != nullptr) return kernel;
  }
#endif
  return kernel_of(call.shape);
}

ExactParameters parameters_of(const AttendExactCall& call) {
  const ModelShape& shape = call.shape;
  return {&call.sequence->rows,
          call.staged,
          call.staged_segment,
          call.total,
          call.tokens,
          call.begin,
          call.end,
          int32_t(shape.segment_tokens),
          int32_t(shape.group),
          int32_t(shape.rows.key_dim),
          int32_t(shape.rows.value_dim),
          call.q.data,
          call.q.stride_i,
          call.q.stride_j,
          call.out.data,
          call.out.stride_i,
          call.out.stride_j,
          call.lse,
          call.lse_stride,
          call.logits.scale,
          call.logits.softcap,
          call.logits.sink_bias,
          call.states,
          int32_t(call.shares),
          call.resumes,
          call.precision == Precision::kFast,
          0};
}

/**
 * Blocks of a head's queries in one launch. While rows come from host memory, the thread blocks
 * that copy them need multiprocessors of their own: beside attention they would wait for one of its
 * blocks to end, each time anew.
 */
int64_t most_blocks(const AttendExactCall& call, const ExactKernel& kernel) {
  if (call.staged == nullptr || !kernel.fills) return INT32_MAX;
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "attend");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "attend");
  const int64_t heads = call.shape.kv_heads * call.shares;
  return std::max((processors - kCopyBlocks) / heads, int64_t{1});
}

constexpr int kFinishThreads = 128;

/** States of all shares to outputs: a warp for each query of a kv head. */
template <typename Element>
__global__ void __launch_bounds__(kFinishThreads) finish_exact(ExactParameters p, int dims) {
  const int64_t index = int64_t(blockIdx.x) * (kFinishThreads / 32) + threadIdx.x / 32;
  const int head = int(blockIdx.y), lane = int(threadIdx.x) % 32;
  if (index >= p.tokens * p.group) return;
  const ExactQuery query(p, head, index);
  const auto state_of = [&](int share) {
    return exact_state(p, share, gridDim.y, head, index, dims);
  };
  float maximum = -infinity();
  for (int i = 0; i < p.shares; ++i) maximum = fmaxf(maximum, state_of(i)[0]);
  const auto weight_of = [&](int share) {
    const float own = state_of(share)[0];
    return own == maximum ? 1.0f : expf((own - maximum) / kLog2E<Element>);
  };
  float sum = 0;
  for (int i = 0; i < p.shares; ++i) {
    const float* sums = state_of(i) + 1;
    sum = fmaf(weight_of(i), sums[0] + sums[1] + (sums[2] + sums[3]), sum);
  }
  const float scale = finish(p, query, maximum / kLog2E<Element>, sum, lane == 0);
  if (p.out == nullptr) return;
  Element* out = query.template output<Element>(p);
  for (int d = lane; d < p.value_dim; d += 32) {
    float weighted = 0;
    for (int i = 0; i < p.shares; ++i) {
      weighted = fmaf(weight_of(i), state_of(i)[kStateWeighted + d], weighted);
    }
    out[d] = from_float<Element>(finite_or_nan(weighted * scale));
  }
}

}  // namespace

int64_t exact_state_floats(const ModelShape& shape) {
  return kernel_of(shape).dims + kStateWeighted;
}
int64_t exact_block_queries(const AttendExactCall& call) { return kernel_of(call).queries; }

void launch_attend_exact(const AttendExactCall& call, cudaStream_t stream) {
  if (call.tokens <= 0) return;
  const ExactKernel kernel = kernel_of(call);
  check(cudaFuncSetAttribute(kernel.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel.bytes),
        "attend");
  const int64_t queries = call.tokens * call.shape.group, most = most_blocks(call, kernel);
  ExactParameters parameters = parameters_of(call);
  for (int64_t left = (queries + kernel.queries - 1) / kernel.queries; left > 0; left -= most) {
    parameters.last_block = int32_t(left - 1);
    const dim3 grid(unsigned(std::min(left, most)), unsigned(call.shape.kv_heads),
                    unsigned(call.shares));
    kernel.address<<<grid, kernel.threads, kernel.bytes, stream>>>(parameters);
    check_launch("attend");
  }
}

void launch_finish_exact(const AttendExactCall& call, cudaStream_t stream) {
  constexpr int64_t kWarps = kFinishThreads / 32;
  const int64_t queries = call.tokens * call.shape.group;
  const dim3 grid(unsigned((queries + kWarps - 1) / kWarps), unsigned(call.shape.kv_heads));
  const auto kernel = dispatch_element(
      call.shape.dtype, [](auto element) { return &finish_exact<decltype(element)>; });
  kernel<<<grid, kFinishThreads, 0, stream>>>(parameters_of(call), kernel_of(call.shape).dims);
  check_launch("attend");
}

}  // namespace pariskv::cuda
