/**
 * The exact top k of 32-bit keys that lie over the blocks of a cluster: larger keys first, then
 * lower indices. Every block counts its keys in bins and sends the counts to all; the bin with the
 * last key of the top k is cut into bins again, until it holds few keys. These are sent to all and
 * ranked. All blocks do the same with the same numbers, as asking takes longer. Definitions are in
 * topk_impl.cuh.
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
constexpr int kKept = 4;

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

/** Makes the space ready for one find_top_k. All threads; ends with a barrier of the cluster. */
__device__ __forceinline__ void open_top_k(const Cluster& cluster, TopKSpace& space);

/**
 * The cut of the `wanted` largest keys; there are more. `keys` belong to this block. Once for a
 * space, after open_top_k. All threads of all blocks of the cluster.
 * @param key_of     key_of(i) of key i
 * @param meanwhile  meanwhile(passes) while other blocks are waited for: passes[turn] says of keys
 *                   of KeysOfLane whether it is certain that they pass. Not always called.
 */
template <typename KeyOf, typename Meanwhile>
__device__ __forceinline__ Cut find_top_k(const Cluster& cluster, int keys, int wanted,
                                          KeyOf key_of, TopKSpace& space, Meanwhile meanwhile);

/**
 * Calls `take(index, i, turn)` for every key i of this block that passes the cut in `space`,
 * `index` its place among all that pass: ascending with i, and over blocks. Key `turn` of a lane is
 * KeysOfLane's. All threads; each takes keys of its own. To be followed by a barrier.
 */
template <typename KeyOf, typename Take>
__device__ __forceinline__ void compact_keys(int keys, KeyOf key_of, CompactSpace& space,
                                             Take take);
/** How many keys of this block passed: after compact_keys, for whole warps. */
__device__ __forceinline__ int passed(const CompactSpace& space);

}  // namespace pariskv::cuda::device
