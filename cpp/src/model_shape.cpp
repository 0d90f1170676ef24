#include "ops.h"

namespace pariskv {

namespace {

/** Rows of a block on the CPU: few, so that a short sequence takes little, and a block of keys. */
constexpr int64_t kBlockRows = 64;

}  // namespace

ModelShape shape_of(const Config& config) {
  ModelShape shape = ModelShape::plain(config.kv_heads, config.group(), config.dtype,
                                       config.head_dim, config.value_dim, config.segment_tokens);
  if (config.borrowed) return shape.borrowing(*config.borrowed);  // addresses are small
  if (config.device.type == DeviceType::kCpu) shape = shape.in_blocks(kBlockRows);
  return config.kv_dtype == KVDType::kInt8 ? shape.narrowing() : shape;
}

ModelShape with_row_cache(const ModelShape& shape, const Config& config, int64_t selected) {
  ModelShape own = shape;
  if (config.placement == Placement::kDevice || selected == 0) return own;
  own.cached_rows = row_cache_slots(config.row_cache < 0 ? 2 * selected : config.row_cache);
  return own;
}

}  // namespace pariskv
