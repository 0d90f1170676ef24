/** What the kernels of a step over pages are launched with. */
#pragma once

#include "device/divisor.cuh"
#include "kept/decode/params.h"
#include "prkv/decode/call.h"

namespace pariskv::cuda {

/** What every kernel needs. */
struct PageStepParams {
  PageDecodeCall call;
  PageScratchLayout scratch;
  device::SegmentDivisor by_segment;  // divides by the tokens of a segment
  device::IndexDivisor by_kv_heads;
};

/** A grid of `blocks_per_head` blocks for each kv head, head by head. */
struct PageScoreParams : PageStepParams {
  int blocks_per_head;
  device::IndexDivisor by_blocks;  // divides by that
};

/** A cluster of blocks for each kv head. */
struct PageAttendParams : PageStepParams {
  int cluster_size;  // a power of two
  int shared_bytes;  // of a block
  int score_blocks;  // per kv head
};

/** A block for each query head. */
struct PageMergeParams {
  KeptStepParams kept;
  PageScratchLayout scratch;
};

}  // namespace pariskv::cuda
