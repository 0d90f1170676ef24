#include "policy/pariskv/codec/schedule.h"

#include <algorithm>
#include <cmath>

namespace pariskv {

const ScheduleStep& schedule_step(const ParisKV& settings, int64_t zone_tokens) {
  const ScheduleStep* step = &settings.schedule.front();
  for (const ScheduleStep& next : settings.schedule) {
    if (next.from_tokens <= zone_tokens) step = &next;
  }
  return *step;
}

int64_t candidate_count(const ParisKV& settings, int64_t zone_tokens) {
  const double ratio = schedule_step(settings, zone_tokens).candidate_ratio;
  const int64_t share = int64_t(std::ceil(ratio * double(zone_tokens)));
  return std::min(zone_tokens, std::max(share, settings.min_candidates_per_row * settings.top_k));
}

}  // namespace pariskv
