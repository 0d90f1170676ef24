/**
 * The last kernel of a decode: what each candidate is worth, the best rows, attention to them, the
 * output. A cluster of blocks per head.
 */
#pragma once

#include "decode_rows.cuh"
#include "device/parts.cuh"
#include "device/staging.cuh"

namespace pariskv::cuda {

/** Tasks of a block, each 32 dimensions of a query head's output, for which others send it parts.
 */
constexpr int kSentTasks = 4;
/** Their parts. */
using SentTasks = device::SentParts[kSentTasks];
static_assert(sizeof(SentTasks) <= sizeof(device::TopKSpace::rows));

template <int kWords>
struct TakeSpace {
  HeadContext context;
  RowSpace rows;
  device::TopKSpace top_k;
  device::SelectSpace select;
  uint64_t slots[device::kMostSlots];
  SentTasks parts;
  float all[device::kHeadsPerPass];  // log-sum-exp of every head
};

/** The parts of a head's attention, sent to the blocks that put them together, or in scratch. */
struct FetchedParts {
  device::PartsInScratch scratch;
  const device::Cluster& cluster;
  uint64_t& barrier;
  SentTasks& sent;
  int chunks;  // of 32 dimensions
  bool sends;

  static constexpr int kBytesOfTask = int(sizeof(device::SentParts));

  __device__ __forceinline__ void leave(int part, int head, int chunk, float maximum, float sum,
                                        float weighted) const {
    if (!sends) return scratch.leave(part, head, chunk, maximum, sum, weighted);
    if (chunk >= chunks) return;
    const int task = head * chunks + chunk, owner = task & (cluster.size - 1);
    float* to = sent[task >> cluster.log_size()][part];
    const int lane = device::lane_id();
    device::send_mail(barrier, owner, to + 2 + lane, device::bits_of(weighted));
    if (lane < 2) {
      device::send_mail(barrier, owner, to + lane, device::bits_of(lane == 0 ? maximum : sum));
    }
  }
};

/** How many keys of this block pass, once they have been compacted. */
__device__ __forceinline__ int passed(const device::SelectSpace& space) {
  const int warp = device::lane_id();
  const int above = __reduce_add_sync(~0u, warp < device::kWarps ? space.above[warp] : 0);
  const int equal = __reduce_add_sync(~0u, warp < device::kWarps ? space.equal[warp] : 0);
  return above + min(equal, space.cut.ties);
}

template <typename Element, int kWords>
struct Take {
  const DecodeLaunch& launch;
  TakeSpace<kWords>& space;
  HeadBlock<Element, kWords> block;
  device::Cluster cluster;

  using Keep = device::KeepInCache;

  __device__ __forceinline__ char* room() const {
    return reinterpret_cast<char*>(&space) + (sizeof space + 127) / 128 * 128;
  }
  __device__ __forceinline__ int room_bytes() const {
    return launch.shared_bytes - int((sizeof space + 127) / 128 * 128);
  }
  /** Rows that are selected of so many candidates. */
  __device__ __forceinline__ int wanted(int candidates) const {
    return int(min(int64_t(candidates), block.call.top_k));
  }

  /** The sums of heads from `from` on. */
  __device__ __forceinline__ device::HeadMasses masses(int from) const {
    const HeadScratch& scratch = block.context.scratch;
    const int64_t row = 2 + block.context.shape.head_dim;
    return {scratch.masses + from, scratch.resident + from * row, block.biases(from),
            block.context.shape.group, row};
  }
  /** Of the head whose number is the warp's; of the last one where there is none. */
  __device__ __forceinline__ device::LaneMasses first_masses() const {
    if (block.mean()) return {};
    return masses(0).load(min(device::warp_id(), block.context.shape.group - 1));
  }

  /** Logits of a few heads that come while there is other work: at first the sums of all heads. */
  struct Ahead {
    static constexpr int kTurns = 2, kFew = 4;
    float logits[kTurns][kFew];

    /** Of a thread's next candidates, from `begin` on. */
    __device__ __forceinline__ void load(const float* estimates, int64_t stride, int heads,
                                         int count, int begin) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
        for (int head = 0; head < kFew; ++head) {
          const int i = begin + turn * device::kThreads;
          const bool exists = i < count && head < heads;
          logits[turn][head] = exists ? __ldcg(estimates + head * stride + i) : 0.0f;
        }
      }
    }
  };
  /** The first of them. */
  __device__ __forceinline__ void look_ahead(int first, int count, Ahead& ahead) const {
    if (block.mean()) return;
    const HeadScratch& scratch = block.context.scratch;
    ahead.load(scratch.estimates + first, scratch.candidate_capacity,
               min(block.context.shape.group, device::kHeadsPerPass), count, int(threadIdx.x));
  }

  /** Leaves worth[i] of candidates [first, first + count). Ends with a barrier. */
  __device__ __forceinline__ void weigh(int first, int count, device::LaneMasses sums, Ahead& ahead,
                                        float* worth) const {
    const HeadScratch& scratch = block.context.scratch;
    const int group = block.context.shape.group;
    const auto leave = [&](int i, float one) {
      worth[i] = one;
      if (launch.call.explains) scratch.worth[first + i] = one;
    };
    if (block.mean()) {
      for (int i = int(threadIdx.x); i < count; i += device::kThreads) {
        leave(i, __ldcg(scratch.estimates + first + i));
      }
      __syncthreads();
      return;
    }
    const int64_t stride = scratch.candidate_capacity;
    const float inverse = __frcp_rn(float(group));
#pragma unroll 1
    for (int from = 0; from < group; from += device::kHeadsPerPass) {
      const int heads = min(group - from, device::kHeadsPerPass);
      const float* estimates = scratch.estimates + from * stride + first;
      if (from > 0) {
        ahead.load(estimates, stride, heads, count, int(threadIdx.x));
        sums = masses(from).load(min(device::warp_id(), heads - 1));
        __syncthreads();
      }
      device::sum_up(masses(from), heads, sums, space.all);
      __syncthreads();
      // A broken query has no say in what the others get.
      const auto share_of = [](float logit, float all) {
        return device::finite(all) ? device::share_of(logit, all) : 0.0f;
      };
      constexpr int kTurns = Ahead::kTurns, kFew = Ahead::kFew;
      float few[kFew];
#pragma unroll
      for (int head = 0; head < kFew; ++head) {
        few[head] = head < heads ? space.all[head] : device::infinity();
      }
#pragma unroll 1
      for (int begin = int(threadIdx.x); begin < count; begin += kTurns * device::kThreads) {
        float shares[kTurns] = {};
#pragma unroll
        for (int k = 0; k < kTurns; ++k) {
#pragma unroll
          for (int head = 0; head < kFew; ++head) {
            shares[k] += share_of(ahead.logits[k][head], few[head]);
          }
        }
        ahead.load(estimates, stride, heads, count, begin + kTurns * device::kThreads);
#pragma unroll
        for (int k = 0; k < kTurns; ++k) {
          const int i = begin + k * device::kThreads;
          if (i >= count) break;
          float sum = from == 0 ? shares[k] : worth[i] + shares[k];
#pragma unroll 4
          for (int head = kFew; head < heads; ++head) {
            sum += share_of(__ldcg(estimates + head * stride + i), space.all[head]);
          }
          if (from + heads < group) {
            worth[i] = sum;
          } else {
            leave(i, sum * inverse);
          }
        }
      }
    }
    __syncthreads();
  }

  /** Selects rows; `list` has those among this block's candidates. Ends with a barrier. */
  __device__ __forceinline__ void select(int candidates, const device::LaneMasses& sums,
                                         Ahead& ahead, RowList<Element, kWords>& list) const {
    const HeadScratch& scratch = block.context.scratch;
    const int first = list.first(), count = list.count();
    // In shared memory where it fits.
    float* worth =
        4 * count <= room_bytes() ? reinterpret_cast<float*>(room()) : scratch.worth + first;
    weigh(first, count, sums, ahead, worth);
    list.look_up_segments();
    const auto key_of = [&](int i) { return device::sortable(worth[i]); };
    device::Cut cut{0, count, first, candidates};  // all of them
    if (candidates > block.call.top_k) {
      cut = device::find_top_k(cluster, count, int(block.call.top_k), key_of, space.top_k,
                               [&](const bool (&passes)[device::kKept]) {
                                 if (launch.hurries) list.start_early(passes);
                               });
    } else {
      cluster.sync();  // as find_top_k: all blocks know of the estimates
    }
    if (threadIdx.x == 0) space.select.cut = cut;
    __syncthreads();
    device::compact_keys(count, key_of, space.select, [&](int index, int i, int turn) {
      scratch.selected[index] = first + i;
      list.note(index - cut.offset, first + i, turn);
    });
    __syncthreads();
    if (cluster.rank == 0 && threadIdx.x == 0) *scratch.selected_count = wanted(candidates);
    list.close(passed(space.select), cut.offset);
  }

  /** Attention to this block's selected rows. */
  __device__ __forceinline__ void attend(const RowList<Element, kWords>& list) const {
    auto* merge = reinterpret_cast<float*>(room());
    char* slots = room() + device::kMergeBytes<kWords>;
    const HeadScratch& scratch = block.context.scratch;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    device::RowAttention<kWords, Element, SelectedRows, SelectedParts, Keep> attention(
        block.context.shape, cluster, slots, int(room() + room_bytes() - slots), space.slots,
        list.parts(), {nullptr, nullptr, 0}, list.addresses(),
        {space.rows.cache, cluster, space.top_k.mail, list.rows(), list.stamped(),
         counters == nullptr ? nullptr : counters + 2});
    const device::AttendShape& shape = block.context.shape;
    const FetchedParts parts{{scratch.fetched, shape.group, shape.head_dim},
                             cluster,
                             space.top_k.mail.parts,
                             space.parts,
                             chunks(),
                             sends_parts()};
    attention.start();
    bring_resident_parts();
    forget_words();
    attention.finish(block.queries(), block.call.q.stride_j, parts, merge);
    if (!parts.sends) cluster.sync();
  }

  /** By which earlier kernels told of what they did: so that a graph can be replayed. */
  __device__ __forceinline__ void forget_words() const {
    const HeadScratch& scratch = block.context.scratch;
    const int mine = device::kThreads * cluster.rank + int(threadIdx.x);
    const int all = device::kThreads * cluster.size;
    for (int i = mine; i < kTold; i += all) scratch.told[i] = 0;
    const int windows = block.context.shape.group * device::kWindowRows;
    for (int i = mine; i < windows; i += all) scratch.windows[i] = 0;
  }

  /** Tasks of the head: 32 dimensions of a query head's output, a warp each. */
  __device__ __forceinline__ int chunks() const { return (block.context.shape.head_dim + 31) / 32; }
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
    return reinterpret_cast<SentTasks&>(space.top_k.rows);
  }
  /** A warp sets those of its task on their way. */
  __device__ __forceinline__ void bring_resident_parts() const {
    const device::AttendShape& shape = block.context.shape;
    const int turn = device::warp_id(), lane = device::lane_id();
    const int task = cluster.rank + cluster.size * turn;
    if (!sends_parts() || task >= tasks()) return;
    const int64_t row = 2 + shape.head_dim, step = shape.group * row;
    const int member = task / chunks(), d = 32 * (task % chunks()) + lane;
    const float* from = block.context.scratch.resident + member * row;
    device::SentParts& to = resident_parts()[turn];
    if (lane < device::kParts) {
      device::stage(&to[lane][0], from + lane * step);
      device::stage(&to[lane][1], from + lane * step + 1);
    }
    if (d < shape.head_dim) {
#pragma unroll 4
      for (int part = 0; part < device::kParts; ++part) {
        device::stage(&to[part][2 + lane], from + part * step + 2 + d);
      }
    }
    device::close_stage();
  }

  /** Parts added up, outputs written. */
  __device__ __forceinline__ void finish() const {
    const device::AttendShape shape = block.context.shape;
    const HeadScratch& scratch = block.context.scratch;
    const bool fetched = block.searches(), mailed = fetched && sends_parts();
    for (int turn = device::warp_id(); cluster.rank + cluster.size * turn < tasks();
         turn += device::kWarps) {
      const int task = cluster.rank + cluster.size * turn;
      const int member = task / chunks(), chunk = task % chunks();
      const int d = 32 * chunk + device::lane_id();
      const int64_t query_head = int64_t(block.context.head) * shape.group + member;
      device::Merged merged;
      if (mailed) {
        device::await_stage<0>();
        __syncwarp();
        device::wait(&space.top_k.mail.parts, 0);
        merged = device::merge_sent(resident_parts()[turn], space.parts[turn]);
      } else {
        device::Parts parts{};
        if (fetched) parts = device::parts_in_scratch(scratch.fetched, shape, member, chunk);
        merged =
            device::merge_parts(device::parts_in_scratch(scratch.resident, shape, member, chunk),
                                parts, d < shape.head_dim);
      }
      float lse = device::log_of_sum(merged.maximum, merged.sum);
      if (block.call.logits.sink_bias != nullptr) {
        lse = device::log_add(lse, block.call.logits.sink_bias[query_head]);
      }
      // The share of all attention that e^maximum stands for; nothing seen leaves zeros.
      const bool none = lse == -device::infinity() || merged.maximum == -device::infinity();
      const float share = none ? 0.0f : expf(merged.maximum - lse);
      if (block.call.out.data != nullptr && d < shape.head_dim) {
        block.at(block.call.out, query_head)[d] =
            device::from_float<Element>(merged.weighted * share);
      }
      if (block.call.lse != nullptr && d == 0) {
        block.call.lse[block.context.row * block.call.lse_stride + query_head] = lse;
      }
    }
  }

  __device__ __forceinline__ void count(int candidates) const {
    if (cluster.rank != 0 || threadIdx.x != 0 || block.call.counters == nullptr) return;
    auto* counters = reinterpret_cast<unsigned long long*>(block.call.counters);
    atomicAdd(counters, static_cast<unsigned long long>(candidates));
    atomicAdd(counters + 1, static_cast<unsigned long long>(wanted(candidates)));
  }

  /** Until all is there that earlier kernels leave. */
  __device__ __forceinline__ void await_estimates() const {
    if (launch.roomy && launch.estimates && block.searches()) {
      device::await_told(block.context.scratch.told_of_estimates(), launch.share, launch.token);
    } else {
      device::wait_for_predecessor();
    }
  }

  __device__ __forceinline__ void run() const {
    await_estimates();
    if (block.searches()) {
      const HeadScratch& scratch = block.context.scratch;
      const device::LaneMasses sums = first_masses();  // with the count: one trip to memory
      const int counted = __ldcg(scratch.candidate_count);
      // There are as many as were wanted, most often: then this is one trip to memory.
      int candidates = block.context.searched;
      RowList<Element, kWords> list(block, cluster, space.rows);
      Ahead ahead;
#pragma unroll 1
      for (;; candidates = counted) {
        list.choose_from(candidates);
        list.look_up_positions();
        look_ahead(list.first(), list.count(), ahead);
        if (candidates == counted) break;
      }
      select(candidates, sums, ahead, list);
      if (sends_parts() && threadIdx.x == 0) expect_parts();
      attend(list);
      count(candidates);
    }
    finish();
    device::RowStores::wait_written();
    device::wait_for_predecessor();
  }
};

template <typename Element, int kWords>
__global__ void __launch_bounds__(device::kThreads, 1)
    take_kernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& space = *reinterpret_cast<TakeSpace<kWords>*>(shared);
  if (launch.announces) return device::pass_on();
  const int size = launch.team, rank = int(blockIdx.x) & (size - 1);  // a power of two
  if (!find_context<Element>(launch, blockIdx.x >> device::log2_of_power(size), space.context,
                             [&](const SequenceView& view, int head) {
                               space.rows.cache = row_cache_of<Element>(launch.call, view, head);
                             })) {
    return device::wait_for_predecessor();
  }
  if (threadIdx.x == 0) space.rows.open();
  device::init_row_barriers(space.slots);
  __syncthreads();
  space.rows.cache.prefetch(rank, size);
  const Take<Element, kWords> take{launch, space, {launch.call, space.context}, {size, rank}};
  device::open_top_k(take.cluster, space.top_k);  // while there is nothing else to do
  take.run();
}

}  // namespace pariskv::cuda
