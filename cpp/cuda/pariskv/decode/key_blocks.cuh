/** The blocks of neighbouring keys that share a mean (policy/pariskv/codec/block_means.h), as a
 * decode sees them.
 */
#pragma once

#include "pariskv/decode/zone.cuh"
#include "policy/pariskv/codec/block_means.h"

namespace pariskv::cuda {

/** The blocks of keys of a zone, in chunks whose logits are summed by one block of threads. */
struct KeyBlocks {
  int first, last;              // numbers, both included
  int first_chunk, last_chunk;  // a chunk begins with a multiple of kChunkBlocks

  __device__ __forceinline__ explicit KeyBlocks(const device::Zone& zone)
      : first(zone.begin >> zone.block_bits),
        last((zone.end - 1) >> zone.block_bits),
        first_chunk(first / int(kChunkBlocks)),
        last_chunk(last / int(kChunkBlocks)) {}

  __device__ __forceinline__ int chunks() const { return last_chunk + 1 - first_chunk; }
};

/** From a block of keys to the next one in `block_steps`: searchers come in fours. */
constexpr int steps_pitch(int searchers) { return (searchers + 3) & ~3; }

/** The logits of a head's blocks, in steps: see HeadScratch::block_steps. */
struct BlockSteps {
  const int32_t* steps;  // (blocks from the zone's origin on, pitch)
  int pitch;
  int bits;   // of the number of keys of a block; 0: keys are encoded whole
  int first;  // number of the block at the zone's origin

  __device__ __forceinline__ BlockSteps(const device::Zone& zone, const int32_t* of, int searchers)
      : steps(of),
        pitch(steps_pitch(searchers)),
        bits(zone.block_bits),
        first(zone.first_block()) {}

  /** Those of the block that has this position, of all searchers. */
  __device__ __forceinline__ const int32_t* at(int position) const {
    return steps + ((position >> bits) - first) * pitch;
  }
};

}  // namespace pariskv::cuda
