#include "policy/pariskv/policy.h"

#include "codec/key_statistics.h"
#include "codec/schedule.h"
#include "pariskv/codec.h"
#include "policy/pariskv/plan.h"

namespace pariskv {

namespace {

Codec make_codec(const ModelShape& shape, uint64_t seed) {
  const MagnitudeLevels& levels = magnitude_levels();
  Codec codec;
  codec.rotation_signs = rotation_signs(shape.rotated_dim, seed);
  codec.thresholds.assign(levels.thresholds.begin(), levels.thresholds.end());
  codec.centres.assign(levels.centres.begin(), levels.centres.end());
  for (const float centre : codec.centres) codec.signed_centres.push_back(-centre);
  for (const float centre : codec.centres) codec.signed_centres.push_back(centre);
  return codec;
}

}  // namespace

ParisKvPolicy::ParisKvPolicy(const ParisKv& settings, int64_t dense_below, const ModelShape& shape,
                             Backend& backend)
    : settings_(settings),
      dense_below_(dense_below),
      shape_(shape),
      backend_(backend),
      codec_(make_codec(shape, settings.seed)) {}

int64_t ParisKvPolicy::state_bytes() const {
  return key_statistics_bytes(shape_, settings_.scorer);
}

void ParisKvPolicy::plan(SequenceView& sequence) const {
  const int64_t zone = sequence.zone_tokens();
  const bool searches = sequence.total >= dense_below_ && zone > settings_.top_k;
  const int64_t candidates = searches ? candidate_count(settings_, zone) : 0;
  ParisKvPlan{candidates, schedule_step(settings_, zone).vote_ratio}.store(sequence);
}

Rules ParisKvPolicy::rules() const {
  const bool mean = settings_.group_rule == GroupRule::kMeanQuery;
  return ParisKvRules{&codec_, settings_.scorer, settings_.group_rule, settings_.top_k,
                      mean ? 1 : shape_.group};
}

EncodeJob ParisKvPolicy::job_of(const Span& span) const {
  return {span.sequence, key_statistics(shape_, settings_.scorer, span.sequence.state), span.begin,
          span.end};
}

void ParisKvPolicy::on_spill(const std::vector<Span>& spans, Stream stream) {
  std::vector<EncodeJob> jobs;
  for (const Span& span : spans) jobs.push_back(job_of(span));
  backend_.keep_up(ParisKvEncode{{shape_, &codec_, int64_t(jobs.size()), jobs.data()}}, stream);
}

void ParisKvPolicy::on_recall(const Span& span, Stream stream) {
  const EncodeJob job = job_of(span);
  backend_.keep_up(ParisKvForget{{shape_, &codec_, 1, &job}}, stream);
}

int64_t ParisKvPolicy::unusable_keys(const SequenceView& sequence) const {
  if (sequence.state == nullptr) return 0;
  std::vector<int64_t> usable(static_cast<size_t>(shape_.kv_heads));
  const KeyStatistics known = key_statistics(shape_, settings_.scorer, sequence.state);
  backend_.fetch(usable.data(), known.usable, shape_.kv_heads * int64_t(sizeof(int64_t)));
  int64_t unusable = 0;
  for (const int64_t count : usable) unusable += sequence.zone_tokens() - count;
  return unusable;
}

}  // namespace pariskv
