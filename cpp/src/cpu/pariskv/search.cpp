// ParisKV's search, verb after verb, over arrays that are cut anew for every step.
#include "cpu/pariskv/search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "policy/pariskv/codec/key_statistics.h"

namespace pariskv::cpu {

namespace {

/** Whether somebody asks what the sample adds. */
bool weighs(const DecodeArgs& args, const ParisKVRules& rules) {
  return rules.error > 0 || (rules.estimates_error && (args.traced || args.error.data != nullptr));
}

SearchItem cut_item(const DecodeArgs& args, const ParisKVRules& rules, const SequenceView& sequence,
                    Cutter& cutter) {
  const ModelShape& shape = args.shape;
  const SummaryLayout& layout = rules.codec->layout;
  const int64_t heads = shape.kv_heads;
  const int64_t queries = heads * rules.searchers;
  const int64_t zone = sequence.zone_tokens();
  const int64_t segments = (sequence.zone_end + shape.segment_tokens - 1) / shape.segment_tokens -
                           sequence.zone_begin / shape.segment_tokens;
  SearchItem item{};
  item.sequence = sequence;
  item.plan = ParisKVPlan::of(sequence);
  const int64_t candidates = item.candidates();
  item.statistics = key_statistics(layout, rules.scorer, sequence[Part::kState]);
  if (layout.block > 0) {
    item.balance = balance_of(layout, shape.rows.key_dim, sequence[Part::kState]);
    item.first_block = sequence.zone_begin / layout.block;
    item.blocks = (sequence.zone_end - 1) / layout.block + 1 - item.first_block;
    item.per_step = cutter.take<float>(queries);
    item.block_steps = cutter.take<int32_t>(queries * item.blocks);
  }
  item.rotated = cutter.take<float>(queries * layout.rotated_dim);
  item.quantised = cutter.take<int8_t>(queries * layout.rotated_dim);
  item.scales = cutter.take<HeadScale>(queries);
  item.slope = cutter.take<float>(queries);
  item.variance_term = cutter.take<float>(queries);
  item.offset = cutter.take<float>(queries);
  item.octave = cutter.take<int32_t>(heads);
  if (rules.scorer == Scorer::kVotes) {
    item.votes = cutter.take<uint8_t>(queries * layout.subspaces() * 256);
  }
  item.scores = cutter.take<uint8_t>(heads * zone);
  item.histograms = cutter.take<int32_t>(heads * segments * 256);
  item.candidate = cutter.take<int32_t>(heads * (candidates + kCollectSlack));
  item.candidate_count = cutter.take<int64_t>(heads);
  item.least = cutter.take<uint8_t>(heads);
  item.estimates = cutter.take<float>(queries * candidates);
  item.totals = cutter.take<float>(queries);
  item.worth = cutter.take<float>(heads * candidates);
  item.order = cutter.take<uint64_t>(heads * candidates);
  item.selected_worth = cutter.take<float>(heads * rules.top_k);
  item.selected_candidate = cutter.take<int32_t>(heads * rules.top_k);
  if (weighs(args, rules)) {
    item.budget = cutter.take<ErrorBudget>(heads);
    if (rules.error > 0) item.candidate_scale = cutter.take<float>(heads * candidates);
    item.squares = cutter.take<float>(heads * candidates);
    item.mass = cutter.take<uint64_t>(heads);
    item.left = cutter.take<uint64_t>(heads);
    item.error = cutter.take<float>(heads);
  }
  item.tail = Tail::beside(std::min(rules.top_k, candidates), sequence.zone_begin,
                           sequence.zone_end, rules.tail_rows, uint32_t(sequence.tail_seed));
  item.tail_selected = cutter.take<uint8_t>(heads * Tail::capacity(rules.tail_rows));
  return item;
}

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

/** That a head has reached, as a number; NaN where no query has a say. */
float share_of(const SearchItem& item, int64_t head) {
  const ErrorBudget& budget = item.budget[head];
  return budget.all == 0 ? kNone
                         : float(budget.counted(item.mass[head])) / float(DecodeCounts::kOne);
}

/**
 * That the sample has added to the head's outputs.
 * @param tail_squares  (query_heads); null: before rows are drawn
 */
float error_of(const SearchItem& item, int64_t head, int64_t group, const float* tail_squares) {
  const ErrorBudget& budget = item.budget[head];
  if (budget.all == 0) return kNone;
  if (tail_squares == nullptr) return std::sqrt(budget.expected(item.left[head]));
  float sum = 0;
  for (int64_t g = 0; g < group; ++g) {
    if (std::isfinite(item.totals[head * group + g])) sum += tail_squares[head * group + g];
  }
  return std::sqrt(budget.variance(item.left[head], square_of(sum / float(group))));
}

}  // namespace

void ParisKVSearch::cut(const DecodeArgs& args, const Selection& selection, Cutter& cutter) {
  items_.clear();
  for (int64_t i = 0; i < args.batch; ++i) {
    if (args.sequences[i].dense()) continue;
    SearchItem item = cut_item(args, rules_, args.sequences[i], cutter);
    item.row = i;
    item.selected = selection.position + i * args.shape.kv_heads * selection.width;
    item.selected_count = selection.count + i * args.shape.kv_heads;
    item.tail_number = selection.tail_number + i * args.shape.kv_heads * selection.tail_width;
    item.tail_position = selection.tail_position + i * selection.tail_width;
    item.tail_count = selection.tail_count + i * args.shape.kv_heads;
    if (selection.tail_weight != nullptr) {
      selection.tail_weight[i] = item.tail.weight(item.sequence.zone_tokens());
    }
    items_.push_back(item);
  }
}

void ParisKVSearch::find(const DecodeArgs& args, const Running& running) {
  const SearchArgs search{args, rules_, running, items_};
  prepare_query(search);
  score(search);
  select(search);
  rerank(search);
  list_tail(search);
}

bool ParisKVSearch::weighs_tail(const DecodeArgs& args) const { return weighs(args, rules_); }

void ParisKVSearch::judge(const DecodeArgs& args, const Running& running) {
  const ModelShape& shape = args.shape;
  for (const SearchItem& item : items_) {
    if (item.budget == nullptr) continue;
    const float* squares = running.selection.tail_squares + item.row * shape.query_heads();
    // As on every device: a call that only explains makes no copies, and reads no rows in their
    // place.
    if (args.traced && item.sequence[Part::kTailCopies] == nullptr && !shape.layout.borrowed) {
      squares = nullptr;
    }
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      item.error[head] = error_of(item, head, shape.group, squares);
      if (args.error.data != nullptr) floats_of(args.error, item.row)[head] = item.error[head];
    }
  }
}

void ParisKVSearch::count(DecodeCounts& counts) const {
  for (const SearchItem& item : items_) {
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      counts.candidates += item.candidate_count[head];
      if (item.budget == nullptr || item.budget[head].all == 0) continue;
      const int64_t mass = item.budget[head].counted(item.mass[head]);
      ++counts.weighed;
      counts.mass += mass;
      counts.most_missed = std::max(counts.most_missed, DecodeCounts::kOne - mass);
      const int64_t error = int64_t(item.error[head] * float(DecodeCounts::kOne));
      counts.error += error;
      counts.worst = std::max(counts.worst, error);
    }
  }
}

ParisKVTrace ParisKVSearch::trace(const DecodeArgs& args, Stream stream) {
  decode(args, stream);
  const SearchItem& item = items_.front();
  const int64_t zone = item.sequence.zone_tokens(), top_k = rules_.top_k;
  ParisKVTrace trace;
  trace.weighed = item.budget != nullptr;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    const int64_t count = item.candidate_count[head], selected = item.selected_count[head];
    const uint8_t* scores = item.scores + head * zone;
    const int32_t* candidate = item.candidate + head * (item.candidates() + kCollectSlack);
    HeadTrace one;
    one.scores.assign(scores, scores + zone);
    one.candidates.assign(candidate, candidate + count);
    for (int64_t s = 0; s < rules_.searchers; ++s) {
      const float* logits = item.estimates + (head * rules_.searchers + s) * item.candidates();
      one.logits.emplace_back(logits, logits + count);
    }
    const int32_t* indices = item.selected_candidate + head * top_k;
    one.selected.assign(indices, indices + selected);
    const float* worth = item.selected_worth + head * top_k;
    one.worth.assign(worth, worth + selected);
    if (trace.weighed) one.mass = share_of(item, head), one.error = item.error[head];
    trace.heads.push_back(std::move(one));
  }
  return trace;
}

}  // namespace pariskv::cpu
