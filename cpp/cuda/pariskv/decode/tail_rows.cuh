/**
 * The rows that stand for what is not selected (tail.h). The kernel of the resident rows attends to
 * them before any row is selected: each counts for its share of the zone, and its logits are kept.
 * A row that is then selected takes back what it has counted for, so no block has to know which
 * rows the others select.
 */
#pragma once

#include "pariskv/decode/context.cuh"
#include "tail.h"

namespace pariskv::cuda {

/** The tail of a step: none where all of the zone is selected. */
__device__ __forceinline__ Tail tail_of(const DecodeCall& call, const HeadContext& context) {
  return Tail::beside(min(call.top_k, int64_t(context.searched)), context.zone.begin,
                      context.zone.end, call.tail_rows);
}
/** How many keys each row stands for. */
__device__ __forceinline__ float weight_of(const device::Zone& zone, const Tail& tail) {
  return tail.weight(zone.end - zone.begin);
}

}  // namespace pariskv::cuda
