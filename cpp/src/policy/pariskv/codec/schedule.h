/** Which ratios hold for a zone of a given size, and how many candidates that makes. */
#pragma once

#include <cstdint>

#include "pariskv/policies.h"

namespace pariskv {

/** Both of settings that are resolved. The last step that has begun; before any, the first one. */
const ScheduleStep& schedule_step(const ParisKV& settings, int64_t zone_tokens);

/** C: ceil(candidate_ratio * zone), at least min_candidates_per_row * top_k, at most zone. */
int64_t candidate_count(const ParisKV& settings, int64_t zone_tokens);

}  // namespace pariskv
