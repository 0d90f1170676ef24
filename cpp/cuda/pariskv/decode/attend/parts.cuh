/**
 * The parts that attention to rows has left, put together: what a query head is given. Definitions
 * are in parts_impl.cuh.
 */
#pragma once

#include "device/attend_shape.cuh"
#include "device/partition.cuh"

namespace pariskv::cuda::device {

/** The parts of one query head, and 32 of its dimensions. */
struct Parts {
  const float* numbers;  // maximum, sum of the first part; null: there are none
  const float* values;   // of a lane's dimension in the first part
  int64_t step;          // floats from part to part
};

/** Parts as PartsInScratch leaves them. */
__device__ __forceinline__ Parts parts_in_scratch(const float* parts, const AttendShape& shape,
                                                  int head, int chunk);

struct Merged {
  float maximum, sum, weighted;
};

/**
 * Adds the parts of one query head up, for 32 dimensions, a warp.
 * @param tail    those of rows that stand for `weight` keys each; 0: there are none
 * @param exists  whether there is the lane's dimension
 */
__device__ __forceinline__ Merged merge_parts(const Parts& resident, const Parts& fetched,
                                              const Parts& tail, float weight, bool exists);

/** The parts of a task, as they are sent: maximum, sum, 32 weighted values. */
constexpr int kSentFloats = 2 + 32;
using SentParts = float[kParts][kSentFloats];

/** The same of parts that have come to shared memory. */
__device__ __forceinline__ Merged merge_sent(const SentParts& resident, const SentParts& fetched,
                                             const SentParts& tail, float weight);

}  // namespace pariskv::cuda::device
