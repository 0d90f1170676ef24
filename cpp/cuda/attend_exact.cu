// Exact causal attention of a sequence's last tokens over all of it.
//
// One pass: a block keeps its queries and walks over all rows that they see. So the rows are read
// once for every 128 queries of a kv head (32 in 32 bits), wherever they lie.
#include <algorithm>

#include "device/exact_float.cuh"
#include "device/exact_mma.cuh"
#include "elements.h"
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

template <typename Element, int kDim, bool kPadded>
Launch launch_of() {
  if constexpr (sizeof(Element) == 4) {
    return {attend_exact_float<kDim, kPadded>, kFloatThreads,
            kFloatThreads / 32 * kFloatQueries<kDim>, int(sizeof(FloatTiles<kDim>))};
  } else {
    return {attend_exact_mma<Element, kDim, kPadded>, kMmaThreads, kMmaQueries, kMmaBytes<kDim>};
  }
}

// Rows whose K and V are equally long have kernels of their own, but for the longest. Others take
// the least of a few sizes that holds both.
using EvenDims = Sizes<64, 80, 96, 128, 192, 256>;
using PaddedDims = Sizes<128, 256, 512>;

template <typename Element>
Launch launch_of(const RowFormat& rows) {
  if (rows.key_dim == rows.value_dim && contains(EvenDims{}, rows.key_dim)) {
    return dispatch(EvenDims{}, rows.key_dim, [](auto dim) {
      return launch_of<Element, int(decltype(dim)::kValue), false>();
    });
  }
  return dispatch(PaddedDims{}, least_of(PaddedDims{}, std::max(rows.key_dim, rows.value_dim)),
                  [](auto dim) { return launch_of<Element, int(decltype(dim)::kValue), true>(); });
}

}  // namespace

void launch_attend_exact(const AttendExactCall& call, cudaStream_t stream) {
  if (call.tokens <= 0) return;
  const ModelShape& shape = call.shape;
  const ExactParameters p{&call.sequence->rows,
                          call.total,
                          call.tokens,
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
                          call.logits.sink_bias};
  const Launch launch = dispatch_element(
      shape.rows.dtype, [&](auto element) { return launch_of<decltype(element)>(shape.rows); });
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
