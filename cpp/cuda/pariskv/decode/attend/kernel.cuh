/**
 * attend: the worth of each candidate, the best rows, attention to them, the output. A cluster of
 * blocks per head; each block has the candidates of its parts. The walk is `Attend::run`:
 *
 * | step | of | done by |
 * | --- | --- | --- |
 * | wait for estimates and attended rows | the block | pariskv/decode/flags.cuh |
 * | worth of candidates | the block | worth.cuh |
 * | with a budget by error: how many are taken | the cluster | budget.cuh |
 * | the exact best rows | the cluster | device/topk.cuh |
 * | where they lie, which the row cache has | the block | rows.cuh, device/row_cache.cuh |
 * | attention to them, a part at a time | the block | device/attend.cuh |
 * | all parts put together, the output | the cluster | parts.cuh |
 * | where it is asked for: the error | the cluster | error.cuh |
 */
#pragma once

#include "device/ptx.cuh"
#include "device/softmax.cuh"
#include "pariskv/decode/attend/budget.cuh"
#include "pariskv/decode/attend/error.cuh"
#include "pariskv/decode/attend/parts.cuh"
#include "pariskv/decode/attend/rows.cuh"
#include "pariskv/decode/attend/worth.cuh"
#include "pariskv/decode/flags.cuh"
#include "pariskv/decode/key_blocks.cuh"
#include "pariskv/decode/output.cuh"
#include "policy/pariskv/codec/head_scale.h"

namespace pariskv::cuda {

template <bool kNarrow>
struct AttendSpace {
  HeadContext context;
  RowSpace<kNarrow> rows;
  device::TopKSpace top_k;
  device::CompactSpace select;
  uint64_t slots[device::kMostSlots];
  Tail tail;
  SentTasks parts, tail_parts;
  float all[device::kHeadsPerPass];  // log-sum-exp of every head
  device::ErrorSums sums;            // where the error is asked for
};

/** @tparam kNarrow  whether rows of the zone are narrow */
template <typename Element, int kWords, bool kNarrow>
struct Attend {
  const AttendParams& params;
  AttendSpace<kNarrow>& space;
  HeadBlock<Element, kWords> block;
  device::Cluster cluster;

  using Caching = device::CacheRows;

  /** Numbers of heads, then room for anything. */
  __device__ __forceinline__ char* head_sums() const {
    return reinterpret_cast<char*>(&space) + (sizeof space + 127) / 128 * 128;
  }
  __device__ __forceinline__ char* room() const {
    return head_sums() + head_sums_bytes(block.context.shape.group);
  }
  __device__ __forceinline__ int room_bytes() const {
    return params.shared_bytes - int(room() - reinterpret_cast<char*>(&space));
  }
  __device__ __forceinline__ Weighing<Element, kWords> weighing() const {
    return {block, space.all};
  }

  /** Where blocks count keys, while nobody does. */
  __device__ __forceinline__ device::BudgetSpace& bins() const {
    return reinterpret_cast<device::BudgetSpace&>(space.top_k.rows);
  }
  __device__ __forceinline__ void tell(const Weighed& out) const {
    weigh_and_tell(block.call, block.context, masses_of(block, 0), asked_of(block, space.tail),
                   head_sums(), out, space.sums, block.call.error_left > 0 ? &bins() : nullptr);
  }
  __device__ __forceinline__ device::WantedRows rows_within() const {
    const device::SharedBins shared(block.context.scratch.bin_squares);
    return device::rows_within(cluster, asked_of(block, space.tail), int(block.call.top_k), shared,
                               space.sums, bins());
  }

  /** Selects rows; `list` has those among this block's candidates. Ends with a barrier. */
  __device__ __forceinline__ void select(int candidates, const device::LaneMasses& sums,
                                         LogitsAhead& ahead,
                                         RowList<Element, kWords, kNarrow>& list) const {
    const HeadScratch& scratch = block.context.scratch;
    const int first = list.first(), count = list.count();
    const bool tells = block.call.weighs, budget = block.call.error_left > 0;
    // In shared memory where they fit.
    const bool fit = (tells ? 8 : 4) * count <= room_bytes();
    float* worth = fit ? reinterpret_cast<float*>(room()) : scratch.worth + first;
    float* squares = fit ? worth + count : scratch.squares + first;
    if (tells) {
      tell({first, count, worth, squares});
    } else {
      weighing().weigh(first, count, sums, ahead, worth);
    }
    list.look_up_segments();
    const auto key_of = [&](int i) { return device::sortable(worth[i]); };
    device::Cut cut{0, count, first, candidates};  // all of them
    int wanted = int(block.call.top_k);
    if (budget) {
      const device::WantedRows rows = rows_within();
      wanted = rows.wanted;
      if (wanted == 0) cut = rows.cut;
    }
    if (wanted > 0 && candidates > wanted) {
      if (budget) cluster.sync();  // where sums were others send counts
      cut = device::find_top_k(cluster, count, wanted, key_of, space.top_k,
                               [&](const bool (&passes)[device::kKeysInRegisters]) {
                                 if (params.start_rows_early) list.start_early(passes);
                               });
    } else if (!budget) {
      cluster.sync();  // as find_top_k: all blocks know of the estimates
    }
    if (threadIdx.x == 0) space.select.cut = cut;
    __syncthreads();
    device::compact_keys(count, key_of, space.select, [&](int index, int i, int turn) {
      scratch.selected[index] = first + i;
      if (tells) space.sums.select(i, device::mass_of_key(key_of(i)));
      list.note(index - cut.offset, first + i, turn);
    });
    __syncthreads();
    if (cluster.rank == 0 && threadIdx.x == 0) scratch.candidate_count[1] = space.select.cut.count;
    list.close(device::passed(space.select), cut.offset);
  }

  /** Attention to this block's selected rows. */
  __device__ __forceinline__ void attend(const RowList<Element, kWords, kNarrow>& list) const {
    auto* merge = reinterpret_cast<float*>(room());
    char* slots = room() + device::kMergeBytes<kWords>;
    const HeadScratch& scratch = block.context.scratch;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    using Rows = SelectedRows<Element, kNarrow>;
    device::RowAttention<kWords, Element, Rows, SelectedParts, Caching> attention(
        block.context.shape, cluster, slots, int(room() + room_bytes() - slots), space.slots,
        list.parts(), {nullptr, nullptr, 0}, list.addresses(),
        {space.rows.cache, cluster, space.top_k.mail, list.rows(), list.stamped(),
         counters == nullptr ? nullptr : counters + 2});
    const device::AttendShape& shape = block.context.shape;
    const FetchedParts parts{{scratch.fetched, shape.group, shape.value_dim},
                             cluster,
                             space.top_k.mail.parts,
                             space.parts,
                             chunks(),
                             sends_parts()};
    attention.start();
    list.look_up_means();
    // The tail is attended to by now, or while selected rows are on their way.
    device::wait_for_predecessor();
    if (block.call.weighs) weigh_error(list);
    bring_resident_parts();
    clear_flags();
    attention.finish(block.queries(), block.call.q.stride_j, parts, merge);
    if (!parts.sends) cluster.sync();
  }

  /** This block's part of the error. All threads. */
  __device__ __forceinline__ void weigh_error(const RowList<Element, kWords, kNarrow>& list) const {
    if (block.call.error_left == 0 && cluster.rank == 0 && threadIdx.x == 0) {
      space.sums.budget = asked_of(block, space.tail).budget(space.sums);
    }
    if (!has_tail_logits()) return;
    device::square_tail(tail_logits(), cluster, list.rows(), device::passed(space.select));
  }
  /** Whether the error is asked for, and the tail was attended to: `explain` may be without one. */
  __device__ __forceinline__ bool has_tail_logits() const {
    return block.call.weighs && block.context.tail_copies != nullptr;
  }
  __device__ __forceinline__ device::TailLogits tail_logits() const {
    const HeadScratch& scratch = block.context.scratch;
    const device::AttendShape& shape = block.context.shape;
    return {scratch.tail_logits, scratch.sampled,     int(space.tail.count),
            shape.group,         2 + shape.value_dim, scratch.errors};
  }

  /** All of the head's flags. */
  __device__ __forceinline__ void clear_flags() const {
    const HeadScratch& scratch = block.context.scratch;
    const int mine = device::kThreads * cluster.rank + int(threadIdx.x);
    const int all = device::kThreads * cluster.size;
    ReadyFlags{scratch.flags}.clear(mine, all);
    const int windows = block.context.shape.group * int(kWindowRows);
    for (int i = mine; i < windows; i += all) scratch.windows[i] = 0;
    if (block.context.zone.block_bits == 0) return;
    const int chunks = KeyBlocks(block.context.zone).chunks();
    for (int i = mine; i < chunks; i += all) scratch.chunk_flags[i] = 0;
  }

  /** Tasks of the head: 32 dimensions of a query head's output, a warp each. */
  __device__ __forceinline__ int chunks() const {
    return (block.context.shape.value_dim + 31) / 32;
  }
  __device__ __forceinline__ int tasks() const { return block.context.shape.group * chunks(); }
  /** Whether blocks send one another the parts of the tasks. */
  __device__ __forceinline__ bool sends_parts() const {
    return cluster.size > 1 && tasks() <= kSentTasks * cluster.size;
  }
  /** By one thread: so many parts will come. */
  __device__ __forceinline__ void expect_parts() const {
    const int mine = (tasks() - cluster.rank + cluster.size - 1) >> cluster.log_size();
    device::expect_mail(space.top_k.mail.parts, mine * FetchedParts::kBytesOfTask);
  }

  /** Of resident rows, of the tasks for which parts are sent: where blocks were counting keys. */
  __device__ __forceinline__ SentTasks& resident_parts() const {
    static_assert(sizeof(SentTasks) <= sizeof space.top_k.rows);
    return reinterpret_cast<SentTasks&>(space.top_k.rows);
  }
  /** A warp sets those of its task on their way. */
  __device__ __forceinline__ void bring_resident_parts() const {
    const device::AttendShape& shape = block.context.shape;
    const int turn = device::warp_id(), lane = device::lane_id();
    const int task = cluster.rank + cluster.size * turn;
    if (!sends_parts() || task >= tasks()) return;
    const int64_t row = 2 + shape.value_dim, step = shape.group * row;
    const int member = task / chunks(), d = 32 * (task % chunks()) + lane;
    const auto bring = [&](const float* parts, device::SentParts& to) {
      const float* from = parts + member * row;
      if (lane < device::kParts) {
        device::ptx::cp_async_ca(&to[lane][0], from + lane * step);
        device::ptx::cp_async_ca(&to[lane][1], from + lane * step + 1);
      }
      if (d >= shape.value_dim) return;
#pragma unroll 4
      for (int part = 0; part < device::kParts; ++part) {
        device::ptx::cp_async_ca(&to[part][2 + lane], from + part * step + 2 + d);
      }
    };
    bring(block.context.scratch.resident, resident_parts()[turn]);
    if (space.tail.count > 0) bring(block.context.scratch.sampled, space.tail_parts[turn]);
    device::ptx::cp_async_commit_group();
  }

  /** Parts added up, outputs written. */
  __device__ __forceinline__ void finish() const {
    const device::AttendShape shape = block.context.shape;
    const HeadScratch& scratch = block.context.scratch;
    const bool fetched = block.searches(), mailed = fetched && sends_parts();
    const bool has_tail = fetched && space.tail.count > 0;
    const float weight = has_tail ? weight_of(block.context.zone, space.tail) : 0.0f;
    for (int turn = device::warp_id(); cluster.rank + cluster.size * turn < tasks();
         turn += device::kWarps) {
      const int task = cluster.rank + cluster.size * turn;
      const int member = task / chunks(), chunk = task % chunks();
      const int d = 32 * chunk + device::lane_id();
      const int64_t query_head = int64_t(block.context.head) * shape.group + member;
      const device::CommonRows common = tail_common(block.context);
      device::TailValues values;
      if (has_tail && common.any() && d < shape.value_dim) {
        values = {common.value_centre()[d], common.value_unit()[d]};
      }
      device::Merged merged;
      if (mailed) {
        device::ptx::cp_async_wait_group<0>();
        __syncwarp();
        device::wait(&space.top_k.mail.parts, 0);
        merged = device::merge_sent(resident_parts()[turn], space.parts[turn],
                                    space.tail_parts[turn], weight, values);
      } else {
        device::Parts parts{}, tail{};
        if (fetched) parts = device::parts_in_scratch(scratch.fetched, shape, member, chunk);
        if (has_tail) tail = device::parts_in_scratch(scratch.sampled, shape, member, chunk);
        merged =
            device::merge_parts(device::parts_in_scratch(scratch.resident, shape, member, chunk),
                                parts, tail, weight, values, d < shape.value_dim);
      }
      const Output<Element> output{block.call, block.context.row, query_head};
      float* also = fetched && block.call.weighs ? &scratch.errors[member].log_sum : nullptr;
      const float share = output.share_of(merged.maximum, merged.sum, d == 0, also);
      if (d < shape.value_dim) output.give(d, merged.weighted * share);
    }
  }

  /** Tells the error. All threads. */
  __device__ __forceinline__ void judge() const {
    uint64_t* totals = block.context.scratch.totals;
    if (threadIdx.x == 0) {
      totals[cluster.rank] = space.sums.squares;
      totals[device::kMaxCluster + cluster.rank] = space.sums.mass;
    }
    cluster.sync();
    if (cluster.rank > 0 || device::warp_id() > 0) return;
    const device::ErrorLeft left(space.sums.budget, totals, cluster);
    const float weight = weight_of(block.context.zone, space.tail);
    const float variance = has_tail_logits() ? device::judge_tail(tail_logits(), weight, left)
                                             : left.budget.expected(left.squares);
    if (device::lane_id() > 0) return;
    report_of(block).write_mass(left.budget, left.mass);
    report_of(block).write_error(left.budget, variance);
  }

  __device__ __forceinline__ void count(int candidates) const {
    if (cluster.rank != 0 || threadIdx.x != 0 || block.call.counters == nullptr) return;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    atomicAdd(counters, static_cast<unsigned long long>(candidates));
    atomicAdd(counters + 1, static_cast<unsigned long long>(space.select.cut.count));
  }

  /** Until all is there that earlier kernels leave. */
  __device__ __forceinline__ void await_estimates() const {
    if (params.awaits_flags && block.searches()) {
      ReadyFlags{block.context.scratch.flags}.await_reranked(params.rerank_blocks,
                                                             params.resident_blocks, params.token);
    } else {
      device::wait_for_predecessor();
    }
  }

  __device__ __forceinline__ void run() const {
    await_estimates();
    if (block.searches()) {
      const HeadScratch& scratch = block.context.scratch;
      // With the count: one trip to memory.
      const device::LaneMasses sums = weighing().first_masses();
      const int counted = __ldcg(scratch.candidate_count);
      // There are as many as were wanted, most often: then this is one trip to memory.
      int candidates = block.context.searched;
      RowList<Element, kWords, kNarrow> list(block, cluster, space.rows, space.tail);
      LogitsAhead ahead;
#pragma unroll 1
      for (;; candidates = counted) {
        list.choose_from(candidates);
        list.look_up_positions();
        weighing().look_ahead(list.first(), list.count(), ahead);
        if (candidates == counted) break;
      }
      select(candidates, sums, ahead, list);
      if (sends_parts() && threadIdx.x == 0) expect_parts();
      attend(list);
      count(candidates);
    } else if (block.call.error != nullptr && cluster.rank == 0 && threadIdx.x == 0) {
      *error_of(block) = 0;  // all rows are attended to
    }
    finish();
    if (block.call.weighs && block.searches()) judge();
    Caching::finish();
    device::wait_for_predecessor();
  }
};

template <typename Element, int kWords, bool kNarrow>
__global__ void __launch_bounds__(device::kThreads, kWords < 8 ? 2 : 1)
    attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<AttendSpace<kNarrow>*>(shared);
  const int size = params.cluster_size, rank = int(blockIdx.x) & (size - 1);  // a power of two
  if (!find_context<Element>(params, blockIdx.x >> device::log2_of_power(size), space.context,
                             [&](const SequenceView& view, int head) {
                               if constexpr (kNarrow) {
                                 space.rows.narrow.base = NarrowBase::of(
                                     params.call.shape.narrow_base, view[Part::kState], head);
                               }
                               if (params.call.explains) {  // which leaves no trace
                                 space.rows.cache = {};
                               } else {
                                 space.rows.cache = head_row_cache(params.call.shape, view, head);
                               }
                             })) {
    device::wait_for_predecessor();
    if (rank == 0) leave_idle_head<Element>(params, blockIdx.x >> device::log2_of_power(size));
    return;
  }
  if (params.call.dense_apart) {
    __syncthreads();
    if (space.context.searched == 0) return device::wait_for_predecessor();
  }
  if (threadIdx.x == 0) {
    space.rows.early.open();
    if (kNarrow)
      take_format(params.call.shape.narrow, space.context.shape);  // its own thread's words
  }
  device::init_row_barriers(space.slots);
  __syncthreads();
  space.rows.narrow.prefetch(space.context.shape.value_dim);
  if (threadIdx.x == 0) space.tail = tail_of(params.call, space.context);
  space.rows.cache.prefetch(rank, size);
  const Attend<Element, kWords, kNarrow> attend{
      params, space, {params.call, space.context}, {size, rank}};
  device::open_top_k(attend.cluster, space.top_k);  // while there is nothing else to do
  attend.run();
}

}  // namespace pariskv::cuda
