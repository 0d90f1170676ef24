/** A query, rounded to 8 bits, to where it is remembered: as round_query of recent.h. */
#pragma once

#include "device/warp.cuh"
#include "kept/blocks.cuh"
#include "kept/whole.cuh"

namespace pariskv::cuda::device {

/**
 * One head of a query, by a warp. The first head's also says which position's it is.
 * @param most  steps of a logit at most
 */
template <typename Element>
__device__ __forceinline__ void remember_query(const Element* query, float scale, int32_t most,
                                               const RecentLayout& layout, char* block,
                                               int64_t position, int query_head) {
  const RecentQueryPlace place = recent_place(layout, block, position, query_head);
  const int dim = int(layout.key_dim);
  float largest = 0;
  bool whole = true;
  for (int d = lane_id(); d < dim; d += 32) {
    const float x = to_float(query[d]);
    whole = whole && finite(x);
    largest = fmaxf(largest, fabsf(x));
  }
  whole = __all_sync(~0u, whole);
  largest = warp_max(largest);
  const float steps = largest > 0 ? kByteLevels / largest : 0.0f;
  const float step = finite(steps) ? steps : 0.0f;
  for (int d = lane_id(); d < dim; d += 32) {
    place.numbers[d] = int8_t(whole ? nearest_whole(to_float(query[d]) * step) : 0);
  }
  if (lane_id() != 0) return;
  const float unit = scale * (largest / kByteLevels) * kOctaveSteps;
  *place.scale = whole ? RecentScale{unit, most} : RecentScale{float_of(0x7fc00000u), 0};
  if (query_head == 0) *place.position = position + 1;
}

}  // namespace pariskv::cuda::device
