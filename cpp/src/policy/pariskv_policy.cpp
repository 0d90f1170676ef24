#include "policy/pariskv_policy.h"

#include "check.h"
#include "codec/schedule.h"
#include "pariskv/codec.h"

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

ParisKvPolicy::ParisKvPolicy(const Config& config, const ModelShape& shape, Backend& backend)
    : config_(config), shape_(shape), backend_(backend), codec_(make_codec(shape, config.seed)) {}

int64_t ParisKvPolicy::searchers() const {
  return config_.group_rule == GroupRule::kMeanQuery ? 1 : shape_.group;
}

bool ParisKvPolicy::searches(int64_t total, int64_t zone_tokens) const {
  return total >= config_.dense_below && zone_tokens > config_.top_k;
}

KeyStatistics ParisKvPolicy::statistics(void* state) const {
  auto* numbers = static_cast<int64_t*>(state);
  KeyStatistics statistics{};
  statistics.usable = numbers;
  statistics.square_units = statistics.usable + shape_.kv_heads;
  statistics.sums = statistics.square_units + shape_.kv_heads;
  if (config_.scorer == Scorer::kVotes) {
    statistics.counts =
        reinterpret_cast<int32_t*>(statistics.sums + shape_.kv_heads * shape_.rotated_dim);
  }
  return statistics;
}

int64_t ParisKvPolicy::state_bytes() const {
  const int64_t sums = shape_.kv_heads * (2 + shape_.rotated_dim) * int64_t(sizeof(int64_t));
  const int64_t counts = shape_.kv_heads * shape_.subspaces() * 256 * int64_t(sizeof(int32_t));
  return sums + (config_.scorer == Scorer::kVotes ? counts : 0);
}

void ParisKvPolicy::on_spill(const Span& span, Stream stream) {
  const EncodeJob job{span.sequence, statistics(span.sequence.state), span.begin, span.end};
  backend_.encode({shape_, &codec_, 1, &job}, stream);
}

void ParisKvPolicy::on_recall(const Span& span, Stream stream) {
  const EncodeJob job{span.sequence, statistics(span.sequence.state), span.begin, span.end};
  backend_.forget({shape_, &codec_, 1, &job}, stream);
}

SearchItem ParisKvPolicy::cut_item(const SequenceView& sequence, Cutter& cutter) const {
  const int64_t heads = shape_.kv_heads;
  const int64_t queries = heads * searchers();
  const int64_t zone = sequence.zone_tokens();
  const int64_t segments = (sequence.zone_end + shape_.segment_tokens - 1) / shape_.segment_tokens -
                           sequence.zone_begin / shape_.segment_tokens;
  SearchItem item{};
  item.sequence = sequence;
  item.statistics = statistics(sequence.state);
  item.vote_ratio = schedule_step(config_, zone).vote_ratio;
  item.candidates = candidate_count(config_, zone);
  item.rotated = cutter.take<float>(queries * shape_.rotated_dim);
  item.quantised = cutter.take<int8_t>(queries * shape_.rotated_dim);
  item.gain = cutter.take<float>(queries);
  item.offset = cutter.take<float>(queries);
  if (config_.scorer == Scorer::kVotes) {
    item.votes = cutter.take<uint8_t>(queries * shape_.subspaces() * 256);
  }
  item.scores = cutter.take<uint8_t>(heads * zone);
  item.histograms = cutter.take<int32_t>(heads * segments * 256);
  item.candidate = cutter.take<int32_t>(heads * (item.candidates + kCollectSlack));
  item.candidate_count = cutter.take<int64_t>(heads);
  item.estimates = cutter.take<float>(queries * item.candidates);
  item.worth = cutter.take<float>(heads * item.candidates);
  item.order = cutter.take<uint64_t>(heads * item.candidates);
  item.selected_worth = cutter.take<float>(heads * config_.top_k);
  item.selected_candidate = cutter.take<int32_t>(heads * config_.top_k);
  return item;
}

void ParisKvPolicy::reserve(const SequenceView* sequences, int64_t count, Arena& arena) {
  Cutter measure(nullptr);
  for (int64_t i = 0; i < count; ++i) cut_item(sequences[i], measure);
  workspace_.reserve(measure.bytes(), arena);
  items_.reserve(size_t(count));
}

SelectCounts ParisKvPolicy::select(const SelectArgs& args, Stream stream) {
  Cutter cutter(workspace_.data());
  items_.clear();
  for (int64_t i = 0; i < args.batch; ++i) {
    SearchItem item = cut_item(args.sequences[i], cutter);
    item.row = args.rows[i];
    item.selected = args.selected + item.row * shape_.kv_heads * config_.top_k;
    item.selected_count = args.selected_count + item.row * shape_.kv_heads;
    items_.push_back(item);
  }
  PKV_ASSERT(cutter.bytes() <= workspace_.bytes());
  const SearchArgs search{shape_,        &codec_,     config_.scorer, config_.group_rule,
                          config_.top_k, searchers(), args.batch,     items_.data(),
                          args.q,        args.logits, args.maximum,   args.sum};
  backend_.prepare_query(search, stream);
  backend_.score(search, stream);
  backend_.select(search, stream);
  backend_.rerank(search, stream);

  SelectCounts counts;
  for (const SearchItem& item : items_) {
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      counts.candidates += item.candidate_count[head];
      counts.rows += item.selected_count[head];
    }
  }
  return counts;
}

int64_t ParisKvPolicy::unusable_keys(const SequenceView& sequence) const {
  if (sequence.state == nullptr) return 0;
  const KeyStatistics known = statistics(sequence.state);
  int64_t unusable = 0;
  for (int64_t head = 0; head < shape_.kv_heads; ++head) {
    unusable += sequence.zone_tokens() - known.usable[head];
  }
  return unusable;
}

std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend) {
  return std::make_unique<ParisKvPolicy>(config, shape, backend);
}

}  // namespace pariskv
