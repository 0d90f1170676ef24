// Queries of a prompt or a turn, to where they are remembered.
#include "elements.h"
#include "kept/calls.h"
#include "kept/remember/query.cuh"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

constexpr int kRememberThreads = 128;

struct RememberParams {
  RememberCall call;
  RecentLayout layout;
  int32_t most;  // steps of a logit
};

/** A warp: one head of one position's query. */
template <typename Element>
__global__ void __launch_bounds__(kRememberThreads)
    remember_queries(const __grid_constant__ RememberParams params) {
  const RememberCall& call = params.call;
  const int heads = int(params.layout.query_heads);
  const int task = int(blockIdx.x) * (kRememberThreads / 32) + device::warp_id();
  const int i = task / heads, head = task - i * heads;
  if (i >= call.positions) return;
  const auto* query =
      reinterpret_cast<const Element*>(call.q.data) + i * call.q.stride_i + head * call.q.stride_j;
  device::remember_query(query, call.logits.scale, params.most, params.layout, call.recent,
                         call.begin + i, head);
}

}  // namespace

void launch_remember(const RememberCall& call, cudaStream_t stream) {
  constexpr int64_t kWarps = kRememberThreads / 32;
  const RememberParams params{call, call.shape.recent_queries(), most_steps(call.logits.softcap)};
  const int64_t tasks = call.positions * call.shape.query_heads();
  if (tasks == 0) return;
  const unsigned blocks = unsigned((tasks + kWarps - 1) / kWarps);
  dispatch_element(call.shape.dtype, [&](auto element) {
    using Element = decltype(element);
    remember_queries<Element><<<blocks, kRememberThreads, 0, stream>>>(params);
  });
  check_launch("remember");
}

}  // namespace pariskv::cuda
