/**
 * window_logits, ahead of a score by signs: what every head finds in some rows of its window. A few
 * blocks per kv head; score starts beside them and prepares its queries meanwhile.
 */
#pragma once

#include "pariskv/decode/context.cuh"
#include "pariskv/decode/row_address.cuh"
#include "pariskv/decode/window/logits.cuh"

namespace pariskv::cuda {

/** Blocks that look at the window of a kv head. */
constexpr int kWindowBlocks = int(kWindowRows) * device::kRowLanes / device::kThreads;
constexpr int kRowsOfBlock = device::kThreads / device::kRowLanes;
static_assert(kWindowBlocks * kRowsOfBlock == kWindowRows);
static_assert(device::kRowLanes == device::kWarps);

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads)
    window_logits_kernel(const __grid_constant__ WindowParams params) {
  __shared__ HeadContext context;
  __shared__ device::WindowQueries<32 * kWords> queries;
  device::let_successor_start();
  if (!find_context<Element>(params, blockIdx.x / kWindowBlocks, context)) return;
  __syncthreads();
  const HeadBlock<Element, kWords> block{params.call, context};
  if (!block.searches()) return;
  const int end = context.total - 1;  // without the newest
  const int first = min(context.zone.begin, int(kFirstRows));
  const int last = max(context.zone.end, end - int(kLastRows));
  const int rows = first + max(end - last, 0);
  const int row =
      int(blockIdx.x % kWindowBlocks) * kRowsOfBlock + int(threadIdx.x) / device::kRowLanes;
  // Threads of rows that are none read one that is there.
  const int known = min(row, rows - 1);
  device::WindowRow<Element, 32 * kWords> mine;
  mine.read(row_at(block.context, known < first ? max(known, 0) : last + known - first),
            context.shape.key_dim);

  const auto rows_of = block.rows_of_searchers();
  const int slot = device::warp_id(), part = device::lane_id() % device::kRowLanes;
#pragma unroll 1
  for (int head = 0; head < context.shape.group; head += device::kRowLanes) {
    float x[kWords] = {};
    if (head + slot < context.shape.group) {
      device::load_query<Element, kWords>(rows_of(head + slot), x);
    }
    device::quantise_plain<kWords>(x, params.call.logits.scale, queries.elements[slot],
                                   queries.base[slot]);
    __syncthreads();
    const int steps = device::score_row<Element>(queries, mine, params.call.logits.softcap);
    if (head + part < context.shape.group) {
      device::store_relaxed(context.scratch.windows + (head + part) * int(kWindowRows) + row,
                            params.token, row < rows ? steps : device::kNoSteps);
    }
    __syncthreads();
  }
}

}  // namespace pariskv::cuda
