/**
 * The exact top k of 32-bit keys that lie over the blocks of a cluster: larger keys first, then
 * lower indices. The leading digit's histogram leaves few keys undecided; those are ranked, or the
 * next digit is taken.
 */
#pragma once

#include "device/select.cuh"

namespace pariskv::cuda::device {

constexpr int kDigitBits = 12;
constexpr int kBins = 1 << kDigitBits;
constexpr int kCoarse = 64;  // bins of bins
constexpr int kShortList = 128;
static_assert(kThreads == 4 * kCoarse && kShortList <= kThreads);

struct TopKSpace {
  alignas(8) int bins[kBins];          // read by the other blocks,
  int coarse[kCoarse];                 // as is this,
  uint32_t list[kShortList];           // and this: undecided keys of this block
  int gathered[kMaxCluster][kCoarse];  // counts of all blocks
  uint32_t items[kShortList];          // undecided keys of all blocks
  int list_count;
  uint32_t threshold;
  int ties;
};

/** Where the wanted-th largest lies in 64 bins, and what is around it. */
struct Found {
  int bin;
  int above, inside;                // keys in higher bins, and in this one
  int above_before, inside_before;  // those of lower blocks
};

/** Every warp finds the same. */
__device__ __forceinline__ Found find_bin(const int (*counts)[kCoarse], const Cluster& cluster,
                                          int wanted) {
  const int first = 2 * lane_id();
  int a = 0, b = 0, a_before = 0, b_before = 0;
  for (int other = 0; other < cluster.size; ++other) {
    const int2 pair = *reinterpret_cast<const int2*>(&counts[other][first]);
    a += pair.x;
    b += pair.y;
    if (other < cluster.rank) a_before += pair.x, b_before += pair.y;
  }
  const int all = __reduce_add_sync(~0u, a + b);
  const int from_b = all - lanes_before(a + b) - a;  // keys in bin b or higher
  const int mine = from_b >= wanted ? first + 1 : from_b + a >= wanted ? first : 0;
  Found found;
  found.bin = __reduce_max_sync(~0u, mine);
  const bool a_above = first > found.bin, b_above = first + 1 > found.bin;
  const bool a_in = first == found.bin, b_in = first + 1 == found.bin;
  const auto sum = [](bool take_a, int x, bool take_b, int y) {
    return __reduce_add_sync(~0u, (take_a ? x : 0) + (take_b ? y : 0));
  };
  found.above = sum(a_above, a, b_above, b);
  found.inside = sum(a_in, a, b_in, b);
  found.above_before = sum(a_above, a_before, b_above, b_before);
  found.inside_before = sum(a_in, a_before, b_in, b_before);
  return found;
}

/** 64 counts of every block, a warp bringing those of one. Ends with a barrier. */
__device__ __forceinline__ void gather(const Cluster& cluster, const int* counts,
                                       TopKSpace& space) {
#pragma unroll 2
  for (int other = warp_id(); other < cluster.size; other += kWarps) {
    const int2 pair = *reinterpret_cast<const int2*>(cluster.of(counts + 2 * lane_id(), other));
    *reinterpret_cast<int2*>(&space.gathered[other][2 * lane_id()]) = pair;
  }
  __syncthreads();
}

/**
 * The cut of the `wanted` largest keys; there are more. `keys` belong to this block.
 * Between barriers of the cluster, which it has some of itself.
 * @param key_of  key_of(i) of key i
 */
template <typename KeyOf>
__device__ __forceinline__ Cut find_top_k(const Cluster& cluster, int keys, int wanted,
                                          KeyOf key_of, TopKSpace& space) {
  uint32_t prefix = 0;              // digits of the wanted-th largest so far
  int above = 0, above_before = 0;  // keys that are larger for certain
  Found found{};
  int shift = 32 - kDigitBits;
#pragma unroll 1
  for (int round = 0;; ++round) {
    // 12 bits, 12 bits, and the last 8, which only fill every 16th bin.
    for (int i = threadIdx.x; i < kBins; i += kThreads) space.bins[i] = 0;
    if (threadIdx.x == 0) space.list_count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < keys; i += kThreads) {
      const uint32_t key = key_of(i);
      if (round == 0 || key >> (32 - kDigitBits * round) == prefix) {
        const uint32_t digit = shift >= 0 ? key >> shift : key << -shift;
        atomicAdd(&space.bins[digit % kBins], 1);
      }
    }
    __syncthreads();
    {  // four threads add a coarse bin up
      const int coarse = threadIdx.x / 4, part = threadIdx.x % 4;
      int sum = 0;
      for (int i = 0; i < 16; ++i) {  // starting anywhere else, for the banks' sake
        sum += space.bins[64 * coarse + 4 * ((i + coarse) % 16) + part];
      }
      for (int step = 2; step >= 1; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (part == 0) space.coarse[coarse] = sum;
    }
    cluster.sync();
    gather(cluster, space.coarse, space);
    found = find_bin(space.gathered, cluster, wanted - above);
    above += found.above;
    above_before += found.above_before;
    const int coarse = found.bin;
    __syncthreads();
    gather(cluster, &space.bins[64 * coarse], space);
    found = find_bin(space.gathered, cluster, wanted - above);
    above += found.above;
    above_before += found.above_before;
    const uint32_t digit = uint32_t(64 * coarse + found.bin);
    if (shift < 0) {
      prefix = prefix << (kDigitBits + shift) | digit >> -shift;
      break;
    }
    prefix = prefix << kDigitBits | digit;
    if (found.inside <= kShortList) break;
    shift -= kDigitBits;
    cluster.sync();  // nobody reads the bins any more
  }
  int ties = wanted - above;
  if (shift < 0) {  // all digits are known
    const int before = min(found.inside_before, ties);
    return {prefix, ties - before, above_before + before, wanted};
  }

  for (int i = threadIdx.x; i < keys; i += kThreads) {
    const uint32_t key = key_of(i);
    if (key >> shift == prefix) space.list[atomicAdd(&space.list_count, 1)] = key;
  }
  cluster.sync();
  // Thread i has key i of the undecided ones, of block `owner`.
  const int item = int(threadIdx.x);
  const bool has = item < found.inside;
  const int bin = found.bin;
  int owner = 0;
  uint32_t key = 0;
  if (has) {
    int at = item;
    while (at >= space.gathered[owner][bin]) at -= space.gathered[owner++][bin];
    key = *cluster.of(&space.list[at], owner);
    space.items[item] = key;
  }
  __syncthreads();
  if (has) {
    int larger = 0, equal = 0;
    for (int i = 0; i < found.inside; ++i) {
      larger += space.items[i] > key;
      equal += space.items[i] == key;
    }
    if (larger < ties && ties <= larger + equal) {  // all equal keys write the same
      space.threshold = key;
      space.ties = ties - larger;
    }
  }
  __syncthreads();
  const uint32_t threshold = space.threshold;
  ties = space.ties;
  const bool before = has && owner < cluster.rank;
  above_before += __syncthreads_count(before && key > threshold);
  const int equal_before = __syncthreads_count(before && key == threshold);
  const int ties_before = min(equal_before, ties);
  return {threshold, ties - ties_before, above_before + ties_before, wanted};
}

/**
 * Calls `take(index, i)` for every key i of this block that passes the cut in `space`, `index` its
 * place among all that pass: ascending with i, and over blocks.
 */
template <typename KeyOf, typename Take>
__device__ __forceinline__ void compact_keys(int keys, KeyOf key_of, SelectSpace& space,
                                             Take take) {
  const int begin = warp_begin(keys, warp_id());
  const int end = warp_begin(keys, warp_id() + 1);
  const uint32_t threshold = space.cut.threshold;
  int above = 0, equal = 0;
  for (int i = begin + lane_id(); i < end; i += 32) {
    const uint32_t key = key_of(i);
    above += key > threshold;
    equal += key == threshold;
  }
  Place place = place_of_warp(__reduce_add_sync(~0u, above), __reduce_add_sync(~0u, equal), space);
  const uint32_t lower_lanes = (1u << lane_id()) - 1;
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane_id();
    const uint32_t key = i < end ? key_of(i) : 0;
    const uint32_t above_bits = __ballot_sync(~0u, i < end && key > threshold);
    const uint32_t equal_bits = __ballot_sync(~0u, i < end && key == threshold);
    const int equal_before = __popc(equal_bits & lower_lanes);
    const bool tie = i < end && key == threshold && equal_before < place.ties;
    if (tie || (above_bits >> lane_id() & 1)) {
      take(place.offset + __popc(above_bits & lower_lanes) + min(equal_before, place.ties), i);
    }
    const int taken = min(__popc(equal_bits), place.ties);
    place.offset += __popc(above_bits) + taken;
    place.ties -= taken;
  }
}

}  // namespace pariskv::cuda::device
