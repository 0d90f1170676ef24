#include "policy/pariskv/policy.h"

#include <algorithm>

#include "pariskv/codec.h"
#include "policy/pariskv/codec/block_means.h"
#include "policy/pariskv/codec/key_statistics.h"
#include "policy/pariskv/codec/schedule.h"
#include "policy/pariskv/plan.h"

namespace pariskv {

namespace {

SummaryLayout layout_of(const ModelShape& shape, const ParisKV& settings) {
  return {shape.kv_heads, shape.segment_tokens, rotated_dim_of(shape.rows.key_dim), settings.block};
}

/** Narrow rows lack what the codec takes off keys. */
ModelShape based(const ModelShape& shape, const ParisKV& settings) {
  ModelShape own = shape;
  if (shape.narrows()) own.narrow_base = narrow_layout(layout_of(shape, settings), shape.rows);
  return own;
}

Codec make_codec(const ModelShape& shape, const ParisKV& settings) {
  const MagnitudeLevels& levels = magnitude_levels();
  Codec codec;
  codec.layout = layout_of(shape, settings);
  codec.rotation_signs = rotation_signs(codec.layout.rotated_dim, settings.signs_seed());
  codec.thresholds.assign(levels.thresholds.begin(), levels.thresholds.end());
  codec.centres.assign(levels.centres.begin(), levels.centres.end());
  for (const float centre : codec.centres) codec.signed_centres.push_back(-centre);
  for (const float centre : codec.centres) codec.signed_centres.push_back(centre);
  return codec;
}

/** A zone opens at least so many tokens before it is searched: the window moves at its own pace. */
constexpr int64_t kLeastAhead = 1024;

/** Where a zone's balance is set: enough keys are in it, and it ends with a block of any size. */
int64_t opening_of(int64_t least) {
  return (least + kBalanceGrain - 1) / kBalanceGrain * kBalanceGrain;
}

int64_t tail_rows_of(const ParisKV& settings) {
  return settings.tail == TailRule::kSample ? settings.tail_rows : 0;
}

/** What is left needs a sample that stands for it, and shares of the attention. */
bool estimates_error(const ParisKV& settings) {
  return tail_rows_of(settings) > 0 && settings.group_rule == GroupRule::kAttentionMass;
}

Needs needs_of(const ParisKV& settings, const Config& config, const ModelShape& shape,
               const Crossings& crossings) {
  const SummaryLayout layout = layout_of(shape, settings);
  Needs needs;
  needs.summary_bytes = layout.bytes();
  needs.state_bytes = state_bytes_of(layout, shape.rows.key_dim, settings.scorer) +
                      narrow_state_bytes(shape.narrow_base, shape.kv_heads);
  needs.tail_rows = tail_rows_of(settings);
  needs.tail_seed.reset();
  if (settings.seed) needs.tail_seed = Tail::seed_of(*settings.seed);
  needs.rows_per_head = settings.top_k;
  needs.estimates_error = estimates_error(settings);
  needs.leaves_dense = true;
  // What is not searched needs no summaries: a zone opens some tokens before it is. Narrow rows are
  // searched from the first one on: what is attended to in full is plain.
  const int64_t window = config.local + config.update + std::max<int64_t>(layout.block, 1);
  const int64_t searched_from = config.searched_from();
  needs.steps = {searched_from, true, crossings};
  needs.opening = std::max<int64_t>(searched_from - std::max(window, kLeastAhead), 0);
  if (shape.narrows()) {
    needs.opening = std::max(searched_from, config.sink + settings.top_k + 1);
  }
  if (layout.block > 0) {
    needs.grain = layout.block;
    needs.opening = opening_of(std::max(config.sink + kLeastBalanceKeys, needs.opening));
    const int64_t first = needs.opening - (kBalanceWindows - 1) * kBalanceGrain - kBalanceQueries;
    needs.observed = {first, kBalanceQueries, kBalanceGrain, kBalanceWindows};
  }
  return needs;
}

ParisKVRules rules_of(const ParisKV& settings, const ModelShape& shape, const Codec& codec) {
  const bool mean = settings.group_rule == GroupRule::kMeanQuery;
  return {&codec,
          settings.scorer,
          settings.group_rule,
          settings.top_k,
          mean ? 1 : shape.group,
          tail_rows_of(settings),
          settings.error.value_or(0),
          estimates_error(settings)};
}

}  // namespace

ParisKVPolicy::ParisKVPolicy(const ParisKV& settings, const Config& config, const ModelShape& shape,
                             BackendMemory& memory, const Crossings& crossings)
    : Search(based(shape, settings), needs_of(settings, config, based(shape, settings), crossings)),
      codec_(make_codec(shape, settings)),
      rules_(rules_of(settings, shape, codec_)),
      settings_(settings),
      memory_(memory) {}

bool ParisKVPolicy::plan(SequenceView& sequence) const {
  const int64_t zone = sequence.zone_tokens();
  const int64_t candidates = zone > settings_.top_k ? candidate_count(settings_, zone) : 0;
  ParisKVPlan{candidates, schedule_step(settings_, zone).vote_ratio}.store(sequence);
  return candidates > 0;
}

EncodeJob ParisKVPolicy::job_of(const Span& span) const {
  const SequenceView& view = span.sequence;
  const bool opens = codec_.layout.block > 0 && span.begin == view.zone_begin;
  return {view,
          key_statistics(codec_.layout, settings_.scorer, view[Part::kState]),
          balance_of(codec_.layout, shape_.rows.key_dim, view[Part::kState]),
          span.begin,
          span.end,
          opens ? needs_.opening : 0,
          span.observed / kBalanceQueries};
}

void ParisKVPolicy::observe(const std::vector<QuerySpan>& spans, Stream stream) {
  std::vector<ObserveJob> jobs;
  for (const QuerySpan& span : spans) {
    const Balance balance =
        balance_of(codec_.layout, shape_.rows.key_dim, span.sequence[Part::kState]);
    const int64_t window = span.number / kBalanceQueries;
    jobs.push_back({balance.query_squares + window * shape_.kv_heads * shape_.rows.key_dim,
                    span.number % kBalanceQueries == 0, span.q});
  }
  add_queries({shape_, int64_t(jobs.size()), jobs.data()}, stream);
}

void ParisKVPolicy::enter(const std::vector<Span>& spans, Stream stream) {
  std::vector<EncodeJob> jobs;
  for (const Span& span : spans) jobs.push_back(job_of(span));
  encode({shape_, &codec_, int64_t(jobs.size()), jobs.data()}, stream);
}

void ParisKVPolicy::leave(const Span& span, Stream stream) {
  const EncodeJob job = job_of(span);
  forget({shape_, &codec_, 1, &job}, stream);
}

void ParisKVPolicy::clear_outside(uint8_t* segment, int64_t begin, int64_t end) const {
  const SummaryLayout& layout = codec_.layout;
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    for (int64_t slot = 0; slot < layout.tokens; ++slot) {
      if (slot >= begin && slot < end) continue;
      std::fill_n(layout.signs(segment, head, slot), layout.subspaces(), uint8_t{0});
      *layout.norms(segment, head, slot) = 0;
      *layout.scales(segment, head, slot) = 0;
      std::fill_n(layout.records(segment, head, slot), layout.record_bytes(), uint8_t{0});
    }
    for (int64_t number = 0; number < layout.blocks(); ++number) {
      if ((number + 1) * layout.block > begin && number * layout.block < end) continue;
      std::fill_n(layout.means(segment, head, number), layout.rotated_dim, int8_t{0});
      *layout.steps(segment, head, number) = 0;
    }
  }
}

int64_t ParisKVPolicy::unusable_keys(const SequenceView& sequence) const {
  if (sequence[Part::kState] == nullptr) return 0;
  std::vector<int64_t> usable(static_cast<size_t>(shape_.kv_heads));
  const KeyStatistics known =
      key_statistics(codec_.layout, settings_.scorer, sequence[Part::kState]);
  memory_.fetch(usable.data(), known.usable, shape_.kv_heads * int64_t(sizeof(int64_t)));
  int64_t unusable = 0;
  for (const int64_t count : usable) unusable += sequence.zone_tokens() - count;
  return unusable;
}

}  // namespace pariskv
