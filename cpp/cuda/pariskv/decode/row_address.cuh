/** Where the rows of a head lie, in device or host memory. */
#pragma once

#include "pariskv/decode/context.cuh"

namespace pariskv::cuda {

/** The rows of a position's segment. */
__device__ __forceinline__ char* segment_of(const HeadContext& context, int position) {
  return static_cast<char*>(context.rows[context.zone.segment(position)]);
}
/** A position's row in its segment. */
template <typename Byte>
__device__ __forceinline__ Byte* row_in(const HeadContext& context, Byte* segment, int position) {
  const int slot = device::split_position(context.zone, position).y;
  return segment + (context.head * context.zone.layout.tokens + slot) * context.shape.row_bytes;
}
__device__ __forceinline__ char* row_at(const HeadContext& context, int position) {
  return row_in(context, segment_of(context, position), position);
}

}  // namespace pariskv::cuda
