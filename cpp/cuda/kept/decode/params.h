/** Parameters of the kernels of a step over kept rows. */
#pragma once

#include "device/divisor.cuh"
#include "kept/decode/call.h"

namespace pariskv::cuda {

struct KeptStepParams {
  KeptDecodeCall call;
  device::SegmentDivisor by_segment;  // divides by the tokens of a segment
  device::IndexDivisor by_kv_heads;
  device::IndexDivisor by_heads;  // divides by the kv heads of the batch
  device::IndexDivisor by_group;
  int blocks_per_head;  // that attend
  int32_t most_steps;   // of a logit whose query is remembered
};

/** The first half of launch_kept_decode: parts of the attention, in the scratch. Not of an empty
 * batch. Returns their parameters. */
KeptStepParams launch_kept_attention(const KeptDecodeCall& call, cudaStream_t stream);

}  // namespace pariskv::cuda
