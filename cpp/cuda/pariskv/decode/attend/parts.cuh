/**
 * The parts that attention to rows has left, put together: what a query head is given.
 */
#pragma once

#include "device/attend.cuh"
#include "device/cluster.cuh"
#include "device/mailbox.cuh"
#include "device/partition.cuh"
#include "device/softmax.cuh"
#include "device/warp.cuh"

namespace pariskv::cuda::device {

/** The parts of one query head, and 32 of its dimensions. */
struct Parts {
  const float* numbers;  // maximum, sum of the first part; null: there are none
  const float* values;   // of a lane's dimension in the first part
  int64_t step;          // floats from part to part
};

struct Merged {
  float maximum, sum, weighted;
};

/** The parts of a task, as they are sent: maximum, sum, 32 weighted values. */
constexpr int kSentFloats = 2 + 32;
using SentParts = float[kParts][kSentFloats];

}  // namespace pariskv::cuda::device

namespace pariskv::cuda {

/** Tasks of a block, 32 dimensions of a query head's output each: other blocks send it parts. */
constexpr int kSentTasks = 4;

/** Their parts. */
using SentTasks = device::SentParts[kSentTasks];

}  // namespace pariskv::cuda

namespace pariskv::cuda::device {

/** How the parts of one query head combine. */
struct PartFactors {
  float maximum, sum;
  float factor;  // of this lane's part
  float tail;    // of its part of the tail
};

/** The common part of values of the tail's rows, in a lane's dimension (tail_copies.h). */
struct TailValues {
  float centre = 0, unit = 1;

  /** Adds a weighted sum of them to other rows' sum. */
  __device__ __forceinline__ float add(float weighted, const PartFactors& parts, float tail_sum,
                                       float of_tail) const {
    const float all = warp_sum(tail_sum * parts.tail);
    return __fmaf_rn(all, centre, __fmaf_rn(of_tail, unit, weighted));
  }
};

/**
 * Lane p brings part p: resident parts first, then fetched ones; and in front, parts of the
 * tail.
 * @param weight  of the tail; 0: there is none
 */
__device__ __forceinline__ PartFactors combine_parts(float maximum, float sum, float tail_maximum,
                                                     float tail_sum, float weight) {
  const float top = warp_max(fmaxf(maximum, tail_maximum));
  const float factor = maximum == -infinity() ? 0.0f : exp_of(maximum - top);
  const float tail = tail_maximum == -infinity() ? 0.0f : weight * exp_of(tail_maximum - top);
  return {top, warp_sum(__fmaf_rn(tail_sum, tail, sum * factor)), factor, tail};
}

/** Parts as PartsInScratch leaves them. */
__device__ __forceinline__ Parts parts_in_scratch(const float* parts, const AttendShape& shape,
                                                  int head, int chunk) {
  const int64_t row = 2 + shape.value_dim;
  const float* of_head = parts + head * row;
  return {of_head, of_head + 2 + 32 * chunk + lane_id(), shape.group * row};
}

/**
 * Adds the parts of one query head up, for 32 dimensions, a warp.
 * @param tail    those of rows that stand for `weight` keys each; 0: there are none
 * @param common  of their values
 * @param exists  whether there is the lane's dimension
 */
__device__ __forceinline__ Merged merge_parts(const Parts& resident, const Parts& fetched,
                                              const Parts& tail, float weight,
                                              const TailValues& common, bool exists) {
  const int lane = lane_id();
  float maximum = -infinity(), sum = 0, tail_maximum = -infinity(), tail_sum = 0;
  if (weight > 0 && lane < kParts) {
    tail_maximum = __ldcg(tail.numbers + lane * tail.step);
    tail_sum = __ldcg(tail.numbers + lane * tail.step + 1);
  }
  if (lane < kParts) {
    maximum = __ldcg(resident.numbers + lane * resident.step);
    sum = __ldcg(resident.numbers + lane * resident.step + 1);
  }
  float values[2 * kParts] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (exists) values[part] = __ldcg(resident.values + part * resident.step);
  }
  if (fetched.numbers != nullptr) {
    if (lane >= kParts) {
      maximum = __ldcg(fetched.numbers + (lane - kParts) * fetched.step);
      sum = __ldcg(fetched.numbers + (lane - kParts) * fetched.step + 1);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (exists) values[kParts + part] = __ldcg(fetched.values + part * fetched.step);
    }
  }
  const PartFactors parts = combine_parts(maximum, sum, tail_maximum, tail_sum, weight);
  float weighted = 0;
#pragma unroll
  for (int part = 0; part < 2 * kParts; ++part) {
    weighted = __fmaf_rn(__shfl_sync(~0u, parts.factor, part), values[part], weighted);
  }
  if (weight > 0) {
    float of_tail = 0;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const float value = exists ? __ldcg(tail.values + part * tail.step) : 0.0f;
      of_tail = __fmaf_rn(__shfl_sync(~0u, parts.tail, part), value, of_tail);
    }
    weighted = common.add(weighted, parts, tail_sum, of_tail);
  }
  return {parts.maximum, parts.sum, weighted};
}

/** The same of parts that have come to shared memory. */
__device__ __forceinline__ Merged merge_sent(const SentParts& resident, const SentParts& fetched,
                                             const SentParts& tail, float weight,
                                             const TailValues& common) {
  const int lane = lane_id();
  const float* mine = lane < kParts ? resident[lane] : fetched[lane - kParts];
  const bool has_tail = weight > 0 && lane < kParts;
  const float tail_sum = has_tail ? tail[lane][1] : 0.0f;
  const PartFactors parts =
      combine_parts(mine[0], mine[1], has_tail ? tail[lane][0] : -infinity(), tail_sum, weight);
  float weighted = 0;
#pragma unroll 8
  for (int part = 0; part < kParts; ++part) {
    weighted = __fmaf_rn(__shfl_sync(~0u, parts.factor, part), resident[part][2 + lane], weighted);
  }
#pragma unroll 8
  for (int part = 0; part < kParts; ++part) {
    weighted =
        __fmaf_rn(__shfl_sync(~0u, parts.factor, kParts + part), fetched[part][2 + lane], weighted);
  }
  if (weight > 0) {
    float of_tail = 0;
#pragma unroll 8
    for (int part = 0; part < kParts; ++part) {
      of_tail = __fmaf_rn(__shfl_sync(~0u, parts.tail, part), tail[part][2 + lane], of_tail);
    }
    weighted = common.add(weighted, parts, tail_sum, of_tail);
  }
  return {parts.maximum, parts.sum, weighted};
}

}  // namespace pariskv::cuda::device

namespace pariskv::cuda {

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

}  // namespace pariskv::cuda
