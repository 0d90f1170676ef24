/** The part of a row cache that a kv head has, for every policy that fetches rows. */
#pragma once

#include "device/row_cache.cuh"
#include "ops.h"

namespace pariskv::cuda {

static_assert(kCacheWays == device::kWays);

__device__ __forceinline__ device::RowCache head_row_cache(const ModelShape& shape,
                                                           const SequenceView& view, int head) {
  if (view[Part::kRowCache] == nullptr) return {};
  const RowCacheLayout layout = shape.row_cache();
  const int64_t first = head * layout.slots;
  return {reinterpret_cast<uint64_t*>(view[Part::kRowCache]) + first,
          reinterpret_cast<uint32_t*>(view[Part::kRowCache] + layout.stamps()) + first,
          view[Part::kRowCache] + layout.rows() + first * layout.row_bytes,
          uint32_t(layout.row_bytes),
          int(layout.slots / kCacheWays),
          uint32_t(view.generation),
          uint32_t(view.total)};
}

}  // namespace pariskv::cuda
