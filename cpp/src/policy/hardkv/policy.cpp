#include "policy/hardkv/policy.h"

#include <algorithm>
#include <cmath>

#include "observe.h"
#include "policy/padded.h"

namespace pariskv {

namespace {

HardKVRules rules_of(const HardKV& settings) {
  HardKVRules rules;
  rules.most = settings.most;
  rules.least = settings.least;
  rules.p = uint32_t(std::max(std::nearbyint(settings.p * (1 << kTopPBits)), 1.0));
  rules.pool = settings.metric == KeepMetric::kSnapKv ? settings.pool : 1;
  rules.patience = settings.patience;
  return rules;
}

Needs needs_of(const HardKV& settings, const Config& config) {
  Needs needs;
  needs.steps = {config.searched_from(), false, {}};
  needs.drops_rows = settings.placement == ZoneRows::kDropped;
  needs.fits_a_file = false;  // kept rows and recent queries have no place there
  return needs;
}

}  // namespace

HardKVPolicy::HardKVPolicy(const HardKV& settings, const Config& config, const ModelShape& shape)
    : Search(shape.remembering(HardKV::kRecentQueries), needs_of(settings, config)),
      rules_(rules_of(settings)) {
  static_assert(HardKV::kRecentQueries <= kMostObservers);
}

int64_t HardKVPolicy::kept_rows(int64_t zone_tokens) const {
  const int64_t most = rules_.most * (1 + rules_.patience);
  if (zone_tokens >= most) return most;
  // Four sizes to an octave: every new size is memory that is asked of the device anew.
  int64_t step = 1;
  while (step * 8 <= zone_tokens) step *= 2;
  return std::min(std::max((zone_tokens + step - 1) / step * step, int64_t{1}), most);
}

bool HardKVPolicy::plan(SequenceView& sequence) const {
  // Where a choice would take every row there is nothing to choose.
  const int64_t sure = rules_.p == 1 << kTopPBits ? rules_.most : rules_.least;
  return sequence.zone_tokens() > sure;
}

void HardKVPolicy::explain(const DecodeArgs& args, Stream, Explanation& out) {
  const HardKVTrace own = trace(args);
  HardKVExplanation details;
  details.kv_heads = out.kv_heads;
  padded(own.held, int64_t{-1}, details.held);
  padded(own.kept, int64_t{-1}, out.kept);
  out.details = std::move(details);
}

}  // namespace pariskv
