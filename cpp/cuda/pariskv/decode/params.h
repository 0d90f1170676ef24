/** Parameters of the kernels of a decode step. */
#pragma once

#include "device/divisor.cuh"
#include "page_fill.h"
#include "pariskv/decode/call.h"

namespace pariskv::cuda {

/** Common to all kernels. */
struct StepParams {
  DecodeCall call;
  device::SegmentDivisor by_segment;  // divides by the tokens of a segment
  device::IndexDivisor by_kv_heads;
  uint32_t token;  // of this step: the value of flags that are set
};

/** For each kv head, `window_blocks` and then `mean_blocks`. */
struct WindowParams : StepParams {
  int window_blocks;               // look at rows of the window
  int mean_blocks;                 // look at the means of blocks of keys
  device::IndexDivisor by_blocks;  // divides by the sum
};

/** A grid of `blocks_per_head` blocks for each kv head, head by head. */
struct ScoreParams : StepParams {
  int blocks_per_head;
  device::IndexDivisor by_blocks;  // divides by that
  bool stages_queries;  // queries lie in pieces of 16 bytes: they are asked for first of all
};

struct VotesParams : StepParams {
  int blocks_per_head;
  device::IndexDivisor by_blocks;
  bool packed;  // scores four searchers at a time
};

/** Some sequences of a batch, of which those that are attended to in full are wanted. */
struct DenseParams : StepParams {
  int first, count;
  DenseChoice choice;
};

/** For each sequence of a batch, and for those that pages do not serve. */
struct PagedStepParams {
  const ParisKVSlot* slots;
  int32_t layer, batch;
  uint32_t segment_tokens;
  uint32_t heads;
  uint32_t key, value;  // pieces of a K and of a V
  Rows k, v;            // strides in pieces
  PageFill fill;
  const int32_t* page_rows;  // (batch) null: row s is slot s's
  int32_t* named;            // (batch)
  DenseChoice choice;
};

/** The first blocks of all heads come first. */
struct ResidentParams : StepParams {
  int blocks_per_head;
  device::IndexDivisor by_heads;  // divides by the kv heads of the launch
  bool sets_flags;
};

struct RerankParams : StepParams {
  int warmup_blocks;  // first blocks, without candidates: they bring the code
  int blocks_per_head;
  device::IndexDivisor by_blocks;
  int score_blocks;   // per kv head
  bool awaits_flags;  // of blocks that score; else for the end of the kernel before
  bool sets_flags;
};

/** Shared memory for two numbers of each head of a group. */
constexpr int head_sums_bytes(int heads) { return (8 * heads + 127) / 128 * 128; }

/** A cluster of blocks for each kv head. */
struct AttendParams : StepParams {
  int cluster_size;   // a power of two
  int shared_bytes;   // of a block
  int rerank_blocks;  // per kv head
  int resident_blocks;
  bool awaits_flags;  // of blocks of both kinds; else for the end of the kernel before
  bool start_rows_early;
};

}  // namespace pariskv::cuda
