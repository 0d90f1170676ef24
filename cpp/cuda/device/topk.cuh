/**
 * The exact top k of 32-bit keys that lie over the blocks of a cluster: larger keys first, then
 * lower indices. Every block counts its keys in bins and sends the counts to all; the bin with the
 * last key of the top k is cut into bins again, until it holds few keys. These are sent to all and
 * ranked. All blocks do the same with the same numbers, as asking takes longer.
 *
 * A block calls, with all its threads:
 *
 * | step | after it |
 * | --- | --- |
 * | `open_top_k` | all blocks can receive; once in a launch |
 * | `find_top_k` | the block knows its cut; once in a launch, not where all keys pass |
 * | `compact_keys` | every key that passes has its place among all that do |
 */
#pragma once

#include "device/mailbox.cuh"
#include "device/partition.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

constexpr int kDigitBits = 6;
constexpr int kBins = 1 << kDigitBits;

/** Threads that add up one bin; the rows are spread over the banks for them. */
constexpr int kBinThreads = kThreads / kBins;
constexpr int kBinRow = kBins + 32 / kBinThreads;

/** Keys that are ranked, and the bits of their index. */
constexpr int kListBits = 8;
constexpr int kShortList = 1 << kListBits;

static_assert(kShortList == kThreads);

/** Keys of a thread that stay in registers. */
constexpr int kKeysInRegisters = 4;

/** Of a block, in shared memory. */
struct TopKSpace {
  alignas(16) int bins[2][kBins];         // by turns
  int rows[2][kMaxCluster][kBinRow];      // bins of all blocks
  alignas(16) int2 sums[kBins];           // over all blocks, and over lower ones; last bin first
  alignas(16) uint32_t own[kShortList];   // undecided keys of this block, then the last of all,
  alignas(16) uint32_t list[kShortList];  // and of all
  ClusterMailbox mail;
  int listed, few;  // on the own list, and of the keys that are compared
  uint32_t last;    // on the list, of those that pass
};

/** Keys that a lane looks at: every 32nd of its warp's. */
struct KeysOfLane {
  int begin, end;  // of the warp

  __device__ __forceinline__ explicit KeysOfLane(int keys)
      : begin(warp_begin(keys, warp_id())), end(warp_begin(keys, warp_id() + 1)) {}
  /** Key `turn` of this lane; `end` or more: there is none. */
  __device__ __forceinline__ int key(int turn) const { return begin + 32 * turn + lane_id(); }
};

/** What passes a cut of this block: everything above, and the first `ties` that are equal. */
struct Cut {
  uint32_t threshold;
  int ties;    // of this block that pass
  int offset;  // of this block's first one among all that pass
  int count;   // that pass, in all blocks
};

/** Shared memory of a compaction. */
struct CompactSpace {
  int above[kWarps], equal[kWarps];
  Cut cut;
};

/**
 * The first bins are half octaves of floats, from 2^-24 to 2^7, and what lies below and above: the
 * cut of any shares of attention, and of most logits, lies within.
 */
constexpr int kFirstShift = 22;
constexpr uint32_t kFirstLow = (0x80000000u | (127u - 24u) << 23) - (1u << kFirstShift);

/** Where the wanted-th largest lies among the bins, and what is around it. */
struct Found {
  int bin;
  int above, inside;                // keys in higher bins, and in this one
  int above_before, inside_before;  // those of lower blocks
};

/**
 * Where the wanted-th largest key lies among 64 bins: lane l has bins 63 - 2 l and 62 - 2 l. In one
 * lane, one of its two.
 */
struct BinOfLane {
  bool second;  // the lower one, where it is this lane
  int owner;    // the lane

  /** @param reached  keys in this lane's bins and all higher ones, of which `lower` in the lower */
  __device__ __forceinline__ BinOfLane(int reached, int lower, int wanted) {
    second = reached - lower < wanted;
    owner = __ffs(int(__ballot_sync(~0u, reached >= wanted))) - 1;
    static_assert(kBins == 2 * 32);
  }
  /** What the lane has. */
  __device__ __forceinline__ int of_owner(int x) const { return __shfl_sync(~0u, x, owner); }
  __device__ __forceinline__ int bin() const {
    return of_owner(kBins - 1 - 2 * lane_id() - int(second));
  }
};

/** From `count` rows. Every warp finds the same. */
__device__ __forceinline__ Found find_bin(const int* rows, int count, int rank, int wanted,
                                          TopKSpace& space) {
  constexpr int kOfWarp = 32 / kBinThreads;
  const int part = lane_id() / kOfWarp, bin = warp_id() * kOfWarp + lane_id() % kOfWarp;
  int all = 0, before = 0;
#pragma unroll
  for (int i = 0; i < kMaxCluster / kBinThreads; ++i) {
    const int row = part + kBinThreads * i;
    const int some = row < count ? rows[row * kBinRow + bin] : 0;
    all += some;
    before += row < rank ? some : 0;
  }
#pragma unroll
  for (int step = kOfWarp; step < 32; step *= 2) {
    all += __shfl_xor_sync(~0u, all, step);
    before += __shfl_xor_sync(~0u, before, step);
  }
  if (part == 0) space.sums[kBins - 1 - bin] = make_int2(all, before);
  __syncthreads();
  const int4 two = reinterpret_cast<const int4*>(space.sums)[lane_id()];
  int reached = two.x + two.z, reached_before = two.y + two.w;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int higher = __shfl_up_sync(~0u, reached, step);
    const int higher_before = __shfl_up_sync(~0u, reached_before, step);
    if (lane_id() >= step) reached += higher, reached_before += higher_before;
  }
  const BinOfLane at(reached, two.z, wanted);
  const int above = reached - two.z - (at.second ? 0 : two.x);
  const int above_before = reached_before - two.w - (at.second ? 0 : two.y);
  return {at.bin(), at.of_owner(above), at.of_owner(at.second ? two.z : two.x),
          at.of_owner(above_before), at.of_owner(at.second ? two.w : two.y)};
}

/** Makes the space ready for one find_top_k. All threads; ends with a barrier of the cluster. */
__device__ __forceinline__ void open_top_k(const Cluster& cluster, TopKSpace& space) {
  const int thread = int(threadIdx.x);
  if (thread < kBins) space.bins[0][thread] = 0;
  space.list[thread] = 0;
  if (thread == 32) space.listed = space.few = 0;
  space.mail.open(cluster);
  __syncthreads();
}

/**
 * Whether the list's key of this thread is among the `wanted` largest of its first `count`, which
 * all differ; the last of those is left in the space. Keys have `width` bits. They are counted by
 * their leading ones, and compared with one another where those do not tell. All threads; ends with
 * a barrier.
 * @param bins  zeros
 */
__device__ __forceinline__ bool passes_list(TopKSpace& space, int (&bins)[kBins], int count,
                                            int wanted, int width) {
  const int thread = int(threadIdx.x);
  const bool exists = thread < count;
  const uint32_t key = space.list[thread];
  const int digit = int(key >> (width - kDigitBits));
  if (exists) atomicAdd(&bins[digit], 1);
  __syncthreads();
  const int2 two = reinterpret_cast<const int2*>(bins)[31 - lane_id()];
  const int reached = lanes_before(two.x + two.y) + two.x + two.y;
  const BinOfLane at(reached, two.x, wanted);
  const int bin = at.bin(), above = at.of_owner(reached - two.x - (at.second ? 0 : two.y));
  const bool undecided = exists && digit == bin;
  if (undecided) space.own[atomicAdd(&space.few, 1)] = key;
  __syncthreads();
  const int few = space.few;
  int rank = above;
#pragma unroll 4
  for (int i = 0; i < few; ++i) rank += int(space.own[i] > key);
  if (undecided && rank == wanted - 1) space.last = key;
  __syncthreads();
  return exists && (digit > bin || (undecided && rank < wanted));
}

/**
 * The cut of the `wanted` largest keys; there are more. `keys` belong to this block. Once for a
 * space, after open_top_k. All threads of all blocks of the cluster.
 * @param key_of     key_of(i) of key i
 * @param meanwhile  meanwhile(passes) while other blocks are waited for: passes[turn] says of keys
 *                   of KeysOfLane whether it is certain that they pass. Not always called.
 */
template <typename KeyOf, typename Meanwhile>
__device__ __forceinline__ Cut find_top_k(const Cluster& cluster, int keys, int wanted,
                                          KeyOf key_of, TopKSpace& space, Meanwhile meanwhile) {
  const int thread = int(threadIdx.x);
  const KeysOfLane mine(keys);
  // Undecided are the keys of [low, low + 2^log_width), bins are 2^shift of them.
  uint32_t low = kFirstLow;
  int log_width = 32, shift = kFirstShift;
  const auto undecided = [&](uint32_t key) {
    return __funnelshift_rc(key - low, 0, uint32_t(log_width)) == 0;
  };
  const bool in_registers = keys <= kKeysInRegisters * kThreads;
  uint32_t some[kKeysInRegisters];
  int place[kKeysInRegisters] = {};  // in its bin
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kKeysInRegisters; ++i) {
      const int at = base + i * kThreads;
      some[i] = at < keys ? key_of(at) : 0;
    }
  };
  const auto exists = [&](int turn) { return mine.key(turn) < mine.end; };
#pragma unroll
  for (int i = 0; i < kKeysInRegisters; ++i) some[i] = exists(i) ? key_of(mine.key(i)) : 0;
  int above = 0, above_before = 0;  // keys that are larger for certain
  int exchange = 0;
  Found found{};
#pragma unroll 1
  for (;; ++exchange) {
    int* bins = space.bins[exchange % 2];
    if (thread < kBins) space.bins[1 - exchange % 2][thread] = 0;
    const auto bin_of = [&](uint32_t key) {
      return &bins[min((max(key, low) - low) >> shift, uint32_t(kBins - 1))];
    };
    if (in_registers) {
#pragma unroll
      for (int i = 0; i < kKeysInRegisters; ++i) {
        const bool counts = exists(i) && undecided(some[i]);
        if (counts) place[i] = atomicAdd(bin_of(some[i]), 1);
      }
    } else {
#pragma unroll 1
      for (int base = thread; base < keys; base += kKeysInRegisters * kThreads) {
        load(base);
#pragma unroll
        for (int i = 0; i < kKeysInRegisters; ++i) {
          const bool counts = base + i * kThreads < keys && undecided(some[i]);
          if (counts) atomicAdd(bin_of(some[i]), 1);
        }
      }
    }
    __syncthreads();
    const int* rows = bins;
    if (cluster.size > 1) {
      constexpr int kChunks = kBins / 4;
      static_assert(kChunks * kMaxCluster == kThreads);
      auto& arriving = space.rows[exchange % 2];
      rows = arriving[0];
      if (thread == 0) {
        expect_mail(space.mail.of(exchange), cluster.size * kBins * int(sizeof(int)));
      }
      const int turn = thread / kChunks, chunk = thread % kChunks;
      if (turn < cluster.size) {
        send_mail(space.mail.of(exchange), (cluster.rank + turn) & (cluster.size - 1),
                  &arriving[cluster.rank][4 * chunk], reinterpret_cast<const int4*>(bins)[chunk]);
      }
      space.mail.wait(exchange);
    }
    found = find_bin(rows, cluster.size, cluster.rank, wanted - above, space);
    if (log_width == 32 && low != 0 && (found.bin == 0 || found.bin == kBins - 1)) {
      low = 0;  // all keys again, by their leading bits
      shift = 32 - kDigitBits;
      continue;
    }
    above += found.above;
    above_before += found.above_before;
    low += uint32_t(found.bin) << shift;
    log_width = shift;
    if (log_width == 0 || (found.inside <= kShortList && log_width + kListBits <= 32)) break;
    shift = max(shift - kDigitBits, 0);
  }
  const int ties = wanted - above;
  if (log_width == 0) {  // what is undecided is equal
    const int before = min(found.inside_before, ties);
    return {low, ties - before, above_before + before, wanted};
  }

  const int turn = exchange % 2;
  const int begin = found.inside_before, listed = space.bins[turn][found.bin];
  uint32_t* own = cluster.size > 1 ? space.own : space.list;
  const auto list = [&](uint32_t key, int at) {  // of equal keys the first passes first
    own[at] = (key - low) << kListBits | uint32_t(kShortList - 1 - (begin + at));
  };
  if (in_registers) {
#pragma unroll
    for (int i = 0; i < kKeysInRegisters; ++i) {
      if (exists(i) && undecided(some[i])) list(some[i], place[i]);
    }
  } else {
#pragma unroll 1
    for (int base = thread; base < keys; base += kKeysInRegisters * kThreads) {
      load(base);
#pragma unroll
      for (int i = 0; i < kKeysInRegisters; ++i) {
        if (base + i * kThreads < keys && undecided(some[i])) {
          list(some[i], atomicAdd(&space.listed, 1));
        }
      }
    }
  }
  __syncthreads();
  if (cluster.size > 1) {
    ++exchange;
    if (thread == 0) expect_mail(space.mail.of(exchange), found.inside * int(sizeof(uint32_t)));
    const int other = (cluster.rank + thread) & (cluster.size - 1);
    const int log_size = cluster.log_size();
#pragma unroll 1
    for (int i = thread >> log_size; i < listed; i += kThreads >> log_size) {
      send_mail(space.mail.of(exchange), other, &space.list[begin + i], own[i]);
    }
    if (in_registers) {
      bool passes[kKeysInRegisters];
#pragma unroll
      for (int i = 0; i < kKeysInRegisters; ++i) {
        passes[i] = exists(i) && some[i] > low && !undecided(some[i]);
      }
      meanwhile(passes);
    }
    space.mail.wait(exchange);
  }
  const bool listed_passes =
      passes_list(space, space.bins[1 - turn], found.inside, ties, log_width + kListBits);
  const uint32_t last = space.last >> kListBits;
  const int before = __syncthreads_count(listed_passes && thread < begin);
  const bool own_one = thread >= begin && thread < begin + listed;
  const int tied =
      __syncthreads_count(listed_passes && own_one && space.list[thread] >> kListBits == last);
  return {low + last, tied, above_before + before, wanted};
}

/** Where a warp's first one lies among those that pass. */
struct Place {
  int offset;
  int ties;  // that may still pass
};

/** From how many of each warp are above and equal. Ends with a barrier. */
__device__ __forceinline__ Place place_of_warp(int above, int equal, CompactSpace& space) {
  if (lane_id() == 0) {
    space.above[warp_id()] = above;
    space.equal[warp_id()] = equal;
  }
  __syncthreads();
  const bool before = lane_id() < warp_id();
  const int above_before = __reduce_add_sync(~0u, before ? space.above[lane_id()] : 0);
  const int equal_before = __reduce_add_sync(~0u, before ? space.equal[lane_id()] : 0);
  const int taken = min(equal_before, space.cut.ties);
  return {space.cut.offset + above_before + taken, space.cut.ties - taken};
}

/** How many keys of this block passed: after compact_keys, for whole warps. */
__device__ __forceinline__ int passed(const CompactSpace& space) {
  const int warp = lane_id();
  const int above = __reduce_add_sync(~0u, warp < kWarps ? space.above[warp] : 0);
  const int equal = __reduce_add_sync(~0u, warp < kWarps ? space.equal[warp] : 0);
  return above + min(equal, space.cut.ties);
}

/**
 * Calls `take(index, i, turn)` for every key i of this block that passes the cut in `space`,
 * `index` its place among all that pass: ascending with i, and over blocks. Key `turn` of a lane is
 * KeysOfLane's. All threads; each takes keys of its own. To be followed by a barrier.
 */
template <typename KeyOf, typename Take>
__device__ __forceinline__ void compact_keys(int keys, KeyOf key_of, CompactSpace& space,
                                             Take take) {
  const KeysOfLane mine(keys);
  const int begin = mine.begin, end = mine.end;
  const uint32_t threshold = space.cut.threshold;
  // Of 32 keys, a bit each.
  struct Bits {
    uint32_t above, equal;
  };
  const auto look = [&](int base) {
    const int i = base + lane_id();
    const uint32_t key = i < end ? key_of(i) : 0;
    return Bits{__ballot_sync(~0u, i < end && key > threshold),
                __ballot_sync(~0u, i < end && key == threshold)};
  };
  const Bits first = look(begin), second = look(begin + 32);  // most often all there are
  int above = __popc(first.above) + __popc(second.above);
  int equal = __popc(first.equal) + __popc(second.equal);
#pragma unroll 2
  for (int base = begin + 64; base < end; base += 32) {
    const Bits more = look(base);
    above += __popc(more.above);
    equal += __popc(more.equal);
  }
  Place place = place_of_warp(above, equal, space);
  const uint32_t lower_lanes = (1u << lane_id()) - 1;
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const Bits bits = base == begin ? first : base == begin + 32 ? second : look(base);
    const int equal_before = __popc(bits.equal & lower_lanes);
    const bool tie = (bits.equal >> lane_id() & 1) && equal_before < place.ties;
    if (tie || (bits.above >> lane_id() & 1)) {
      take(place.offset + __popc(bits.above & lower_lanes) + min(equal_before, place.ties),
           base + lane_id(), (base - begin) / 32);
    }
    const int taken = min(__popc(bits.equal), place.ties);
    place.offset += __popc(bits.above) + taken;
    place.ties -= taken;
  }
}

}  // namespace pariskv::cuda::device
