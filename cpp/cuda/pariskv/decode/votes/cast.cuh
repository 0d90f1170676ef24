/** The votes of a query, as published: sorted centroids, tiers. */
#pragma once

#include <cstdint>

#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** Sorts 256 numbers, upwards; lane holds elements 8 lane + r. A bitonic network. */
__device__ __forceinline__ void sort_in_warp(uint64_t (&key)[8]) {
#pragma unroll 1
  for (int block = 2; block <= 256; block *= 2) {
#pragma unroll 1
    for (int step = block / 2; step >= 8; step /= 2) {
      const bool low = (lane_id() & (step / 8)) == 0;
      const bool upwards = (lane_id() & (block / 8)) == 0;  // block is 16 or more here
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const uint64_t other = __shfl_xor_sync(~0u, key[r], step / 8);
        const bool smaller = key[r] < other;
        key[r] = (low == upwards) == smaller ? key[r] : other;
      }
    }
#pragma unroll
    for (int step = 4; step >= 1; step /= 2) {
      if (step >= block) continue;
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (r & step) continue;
        const bool upwards = ((8 * lane_id() + r) & block) == 0;
        const uint64_t a = key[r], b = key[r + step];
        const bool swap = (a < b) != upwards;
        key[r] = swap ? b : a;
        key[r + step] = swap ? a : b;
      }
    }
  }
}

/**
 * The votes of one subspace's 256 centroids, by a warp: from the nearest to the query down, a
 * centroid gets one vote for every tier in which the keys before it leave room.
 * @param part    (8) of the rotated query
 * @param counts  (256) keys per centroid
 * @param votes   (256) written
 */
__device__ __forceinline__ void cast_votes(const float* part, const int32_t* counts, int64_t keys,
                                           double vote_ratio, uint8_t* votes) {
  uint64_t key[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int id = 8 * lane_id() + r;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fadd_rn(sum, id >> j & 1 ? part[j] : -part[j]);
    key[r] = uint64_t(~sortable(sum)) << 32 | uint32_t(id);
  }
  sort_in_warp(key);

  int count[8], sum = 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) sum += count[r] = counts[uint32_t(key[r]) & 255];
  int before = lanes_before(sum);

  constexpr double kTiers[] = {.05, .15, .30, .50, .75, 1};
  int room[6];
#pragma unroll
  for (int t = 0; t < 6; ++t) {
    room[t] = int(ceil(__dmul_rn(__dmul_rn(double(keys), vote_ratio), kTiers[t])));
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    int tiers = 0;
#pragma unroll
    for (int t = 0; t < 6; ++t) tiers += before < room[t];
    votes[uint32_t(key[r]) & 255] = uint8_t(tiers);
    before += count[r];
  }
}

}  // namespace pariskv::cuda::device
