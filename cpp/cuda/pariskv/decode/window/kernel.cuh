/**
 * window_logits, ahead of a score by signs: what every head finds in some rows of its window, and
 * in the means of its blocks of keys. A few blocks per kv head; score starts beside them and
 * prepares its queries meanwhile.
 */
#pragma once

#include "pariskv/decode/context.cuh"
#include "pariskv/decode/window/logits.cuh"
#include "pariskv/decode/window/means.cuh"

namespace pariskv::cuda {

/** Blocks that look at the window of a kv head. */
constexpr int kWindowBlocks = int(kWindowRows) * device::kRowLanes / device::kThreads;
constexpr int kRowsOfBlock = device::kThreads / device::kRowLanes;
static_assert(kWindowBlocks * kRowsOfBlock == kWindowRows);
static_assert(device::kRowLanes == device::kWarps);

/** What is asked of the window: rows `rank * kRowsOfBlock` and on. All threads. */
template <typename Element, int kWords>
__device__ __forceinline__ void look_at_rows(const WindowParams& params,
                                             const HeadBlock<Element, kWords>& block,
                                             device::WindowQueries<32 * kWords>& queries,
                                             int rank) {
  const HeadContext& context = block.context;
  const int end = context.total - 1;  // without the newest
  const int first = min(context.zone.begin, int(kFirstRows));
  const int last = max(context.zone.end, end - int(kLastRows));
  const int rows = first + max(end - last, 0);
  const int row = rank * kRowsOfBlock + int(threadIdx.x) / device::kRowLanes;
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
    device::quantise_plain(x, kByteLevels, params.call.logits.scale, queries.elements[slot],
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

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads)
    window_logits_kernel(const __grid_constant__ WindowParams params) {
  union Space {
    device::WindowQueries<32 * kWords> rows;
    MeanSpace<kWords> means;
  };
  __shared__ HeadContext context;
  __shared__ Space space;
  device::let_successor_start();
  const uint32_t head = params.by_blocks(int(blockIdx.x));
  const int rank = int(blockIdx.x) - int(head) * (params.window_blocks + params.mean_blocks);
  if (!find_context<Element>(params, head, context)) return;
  __syncthreads();
  const HeadBlock<Element, kWords> block{params.call, context};
  if (!block.searches()) return;
  if (rank < params.window_blocks) return look_at_rows(params, block, space.rows, rank);
  const Means<Element, kWords> means{params, block, space.means, KeyBlocks(context.zone)};
  means.run(rank - params.window_blocks, params.mean_blocks);
}

}  // namespace pariskv::cuda
