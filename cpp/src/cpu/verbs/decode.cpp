// A decode step: the verbs in their order, over scratch that is cut anew for every step.
#include "check.h"
#include "codec/key_statistics.h"
#include "cpu/cpu_backend.h"

namespace pariskv::cpu {

namespace {

SearchItem cut_item(const DecodeArgs& args, const SequenceView& sequence, Cutter& cutter) {
  const ModelShape& shape = args.shape;
  const int64_t heads = shape.kv_heads;
  const int64_t queries = heads * args.rules.searchers;
  const int64_t zone = sequence.zone_tokens();
  const int64_t segments = (sequence.zone_end + shape.segment_tokens - 1) / shape.segment_tokens -
                           sequence.zone_begin / shape.segment_tokens;
  const int64_t candidates = sequence.candidates;
  SearchItem item{};
  item.sequence = sequence;
  item.statistics = key_statistics(shape, args.rules.scorer, sequence.state);
  item.rotated = cutter.take<float>(queries * shape.rotated_dim);
  item.quantised = cutter.take<int8_t>(queries * shape.rotated_dim);
  item.scales = cutter.take<HeadScale>(queries);
  item.gain = cutter.take<float>(queries);
  item.lift = cutter.take<float>(queries);
  item.offset = cutter.take<float>(queries);
  if (args.rules.scorer == Scorer::kVotes) {
    item.votes = cutter.take<uint8_t>(queries * shape.subspaces() * 256);
  }
  item.scores = cutter.take<uint8_t>(heads * zone);
  item.histograms = cutter.take<int32_t>(heads * segments * 256);
  item.candidate = cutter.take<int32_t>(heads * (candidates + kCollectSlack));
  item.candidate_count = cutter.take<int64_t>(heads);
  item.least = cutter.take<uint8_t>(heads);
  item.estimates = cutter.take<float>(queries * candidates);
  item.worth = cutter.take<float>(heads * candidates);
  item.order = cutter.take<uint64_t>(heads * candidates);
  item.selected_worth = cutter.take<float>(heads * args.rules.top_k);
  item.selected_candidate = cutter.take<int32_t>(heads * args.rules.top_k);
  return item;
}

}  // namespace

Running CpuBackend::cut(const DecodeArgs& args, Cutter& cutter) {
  const ModelShape& shape = args.shape;
  const int64_t queries = args.batch * shape.query_heads();
  int64_t lists = 0;
  for (int64_t i = 0; i < args.batch; ++i) {
    if (args.sequences[i].searched()) lists = args.batch * shape.kv_heads;
  }
  Running running{};
  running.maximum = cutter.take<float>(queries);
  running.sum = cutter.take<float>(queries);
  running.weighted = cutter.take<float>(queries * shape.head_dim);
  running.selected = cutter.take<int32_t>(lists * args.rules.top_k);
  running.selected_count = cutter.take<int64_t>(lists);
  items_.clear();
  for (int64_t i = 0; i < args.batch; ++i) {
    if (!args.sequences[i].searched()) continue;
    SearchItem item = cut_item(args, args.sequences[i], cutter);
    item.row = i;
    item.selected = running.selected + i * shape.kv_heads * args.rules.top_k;
    item.selected_count = running.selected_count + i * shape.kv_heads;
    items_.push_back(item);
  }
  return running;
}

void CpuBackend::reserve(const DecodeArgs& args) {
  Cutter measure(nullptr);
  cut(args, measure);
  const int64_t bytes = measure.bytes();
  if (bytes <= scratch_.bytes()) return;
  scratch_ = Block();  // first, so that old and new are never held together
  try {
    scratch_ = arena_.allocate(bytes + bytes / 8);  // a growing zone asks a little more each time
  } catch (const OutOfMemory&) {
    scratch_ = arena_.allocate(bytes);
  }
}

void CpuBackend::decode(const DecodeArgs& args, Stream) {
  Cutter cutter(scratch_.as<char>());
  const Running running = cut(args, cutter);
  PKV_ASSERT(cutter.bytes() <= scratch_.bytes());
  const SearchArgs search{args, running, items_};
  attend_resident(search);
  if (!items_.empty()) {
    prepare_query(search);
    score(search);
    select(search);
    rerank(search);
  }
  attend_selected(search);
  for (const SearchItem& item : items_) {
    for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
      counts_.candidates += item.candidate_count[head];
      counts_.rows += item.selected_count[head];
    }
  }
}

SearchTrace CpuBackend::trace(const DecodeArgs& args, Stream stream) {
  const DecodeCounts before = counts_;
  decode(args, stream);
  counts_ = before;
  SearchTrace trace;
  if (items_.empty()) return trace;
  const SearchItem& item = items_.front();
  const int64_t zone = item.sequence.zone_tokens(), top_k = args.rules.top_k;
  for (int64_t head = 0; head < args.shape.kv_heads; ++head) {
    const int64_t count = item.candidate_count[head], selected = item.selected_count[head];
    const uint8_t* scores = item.scores + head * zone;
    const int32_t* candidate = item.candidate + head * (item.candidates() + kCollectSlack);
    HeadTrace one;
    one.scores.assign(scores, scores + zone);
    one.candidates.assign(candidate, candidate + count);
    for (int64_t s = 0; s < args.rules.searchers; ++s) {
      const float* logits = item.estimates + (head * args.rules.searchers + s) * item.candidates();
      one.logits.emplace_back(logits, logits + count);
    }
    const int32_t* indices = item.selected_candidate + head * top_k;
    one.selected.assign(indices, indices + selected);
    const float* worth = item.selected_worth + head * top_k;
    one.worth.assign(worth, worth + selected);
    trace.push_back(std::move(one));
  }
  return trace;
}

}  // namespace pariskv::cpu
