/**
 * The parts that attention to rows has left, put together: what a query head is given. Definitions
 * are in parts_impl.cuh.
 */
#pragma once

#include "device/attend.cuh"
#include "device/cluster.cuh"
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

namespace pariskv::cuda {

/** Tasks of a block, 32 dimensions of a query head's output each: other blocks send it parts. */
constexpr int kSentTasks = 4;
/** Their parts. */
using SentTasks = device::SentParts[kSentTasks];

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
                                        float weighted) const;
};

}  // namespace pariskv::cuda
