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

}  // namespace

HardKVPolicy::HardKVPolicy(const HardKV& settings, int64_t dense_below, const ModelShape& shape,
                           Backend& backend)
    : own_(rules_of(settings)),
      drops_(settings.placement == ZoneRows::kDropped),
      dense_below_(dense_below),
      shape_(shape),
      backend_(backend) {
  static_assert(HardKV::kRecentQueries <= kMostObservers);
}

int64_t HardKVPolicy::kept_rows(int64_t zone_tokens) const {
  const int64_t most = own_.most * (1 + own_.patience);
  if (zone_tokens >= most) return most;
  // Four sizes to an octave: every new size is memory that is asked of the device anew.
  int64_t step = 1;
  while (step * 8 <= zone_tokens) step *= 2;
  return std::min(std::max((zone_tokens + step - 1) / step * step, int64_t{1}), most);
}

void HardKVPolicy::plan(SequenceView& sequence) const {
  // Where a choice would take every row there is nothing to choose.
  const int64_t sure = own_.p == 1 << kTopPBits ? own_.most : own_.least;
  sequence.sparse = sequence.total >= dense_below_ && sequence.zone_tokens() > sure ? 1 : 0;
}

HardKVKeep HardKVPolicy::keep(const std::vector<KeptChange>& changes) const {
  return {shape_, own_, int64_t(changes.size()), changes.data()};
}

void HardKVPolicy::reserve_keep(const std::vector<KeptChange>& changes) {
  backend_.reserve(keep(changes));
}

void HardKVPolicy::on_keep(const std::vector<KeptChange>& changes, Stream stream) {
  backend_.keep_up(keep(changes), stream);
}

void HardKVPolicy::explain(const Trace& trace, Explanation& out) const {
  const auto& own = std::get<HardKVTrace>(trace);
  HardKVExplanation details;
  details.kv_heads = out.kv_heads;
  padded(own.held, int64_t{-1}, details.held);
  padded(own.kept, int64_t{-1}, out.kept);
  out.details = std::move(details);
}

}  // namespace pariskv
