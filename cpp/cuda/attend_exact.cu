// Exact causal attention of a sequence's last tokens over all of it.
//
// One pass: a block keeps its queries and walks over all rows that they see. So the rows are read
// once for every 128 queries of a kv head (32 in 32 bits), wherever they lie.
#include "device/exact_float.cuh"
#include "device/exact_mma.cuh"
#include "kernels.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

struct Launch {
  void (*kernel)(ExactParameters);
  int threads;
  int queries;  // of a block
  int bytes;    // of shared memory
};

template <typename Element, int kDim>
Launch launch_of() {
  if constexpr (sizeof(Element) == 4) {
    return {attend_exact_float<kDim>, kFloatThreads, kFloatThreads / 32 * kFloatQueries<kDim>,
            int(sizeof(FloatTiles<kDim>))};
  } else {
    return {attend_exact_mma<Element, kDim>, kMmaThreads, kMmaQueries, kMmaBytes<kDim>};
  }
}

template <typename Element>
Launch launch_of(int64_t head_dim) {
  switch (head_dim) {
    case 64:
      return launch_of<Element, 64>();
    case 80:
      return launch_of<Element, 80>();
    case 96:
      return launch_of<Element, 96>();
    case 128:
      return launch_of<Element, 128>();
    default:
      return launch_of<Element, 256>();
  }
}

Launch launch_of(const ModelShape& shape) {
  switch (shape.dtype) {
    case DType::kFloat16:
      return launch_of<__half>(shape.head_dim);
    case DType::kBFloat16:
      return launch_of<__nv_bfloat16>(shape.head_dim);
    default:
      return launch_of<float>(shape.head_dim);
  }
}

}  // namespace

void launch_attend_exact(const AttendExactCall& call, cudaStream_t stream) {
  if (call.tokens <= 0) return;
  const ModelShape& shape = call.shape;
  const ExactParameters p{
      &call.sequence->rows, call.total,        call.tokens,         int32_t(shape.segment_tokens),
      int32_t(shape.group), call.q.data,       call.q.stride_i,     call.q.stride_j,
      call.out.data,        call.out.stride_i, call.out.stride_j,   call.lse,
      call.lse_stride,      call.logits.scale, call.logits.softcap, call.logits.sink_bias};
  const Launch launch = launch_of(shape);
  check(cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             launch.bytes),
        "attend");
  const int64_t queries = call.tokens * shape.group;
  const dim3 grid(unsigned((queries + launch.queries - 1) / launch.queries),
                  unsigned(shape.kv_heads));
  launch.kernel<<<grid, launch.threads, launch.bytes, stream>>>(p);
  check_launch("attend");
}

}  // namespace pariskv::cuda
