#include "codec/schedule.h"

#include <algorithm>
#include <cmath>

namespace pariskv {

const ScheduleStep& schedule_step(const Config& config, int64_t zone_tokens) {
  const ScheduleStep* step = &config.schedule.front();
  for (const ScheduleStep& next : config.schedule) {
    if (next.from_tokens <= zone_tokens) step = &next;
  }
  return *step;
}

int64_t candidate_count(const Config& config, int64_t zone_tokens) {
  const double ratio = schedule_step(config, zone_tokens).candidate_ratio;
  const int64_t share = int64_t(std::ceil(ratio * double(zone_tokens)));
  return std::min(zone_tokens, std::max(share, config.min_candidates_per_row * config.top_k));
}

}  // namespace pariskv
