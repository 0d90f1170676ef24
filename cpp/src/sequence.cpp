#include "sequence.h"

#include <algorithm>

namespace pariskv {

namespace {

SequenceView view_of(const Regions& regions, const RegionSizes& sizes, const Policy& policy) {
  SequenceView view{};
  view.total = regions.total();
  view.zone_begin = regions.sink_end(sizes);
  view.zone_end = regions.retrieval_end(sizes);
  view.kept_capacity = policy.kept_rows(view.zone_tokens());
  policy.plan(view);
  return view;
}

/** Where rows are chosen to be kept: until they are, some attend to the zone in full. */
void set_kept(SequenceView& view, const Policy& policy, const Block* kept) {
  view.kept = kept == nullptr ? nullptr : kept->as<char>();
  if (kept == nullptr && policy.waits_for_kept()) view.sparse = 0;
}

/** A zone that lacks rows cannot be attended to in full, however short it is. */
void set_dropped(SequenceView& view, const Positions& dropped) {
  if (dropped.begin < dropped.end) view.sparse = 1;
}

/** Positions of which no query is ever remembered. */
constexpr Positions kNobody = {kMostTokens, kMostTokens + 1};

}  // namespace

SequenceView Layer::view(const RegionSizes& sizes, const Policy& policy) const {
  SequenceView view = cut(regions, sizes, policy);
  if (view.kept_capacity > 0) set_kept(view, policy, kept.get());
  return view;
}

SequenceView Layer::cut(const Regions& next, const RegionSizes& sizes, const Policy& policy) const {
  SequenceView view = view_of(next, sizes, policy);
  set_dropped(view, dropped_of(next));
  view.rows = store.rows();
  view.summaries = store.summaries();
  view.state = state.data();
  view.row_cache = row_cache.as<char>();
  view.generation = generation;
  view.kept = nullptr;
  if (view.kept_capacity == 0) {
    view.kept = kept_rows(Tail::of(view.zone_begin, view.zone_end, policy.tail_rows()));
  }
  view.recent = recent.as<char>();
  view.device = tables.device();
  return view;
}

SequenceView Change::view(const RegionSizes& sizes, const Policy& policy) const {
  SequenceView view = view_of(next, sizes, policy);
  set_dropped(view, dropped);
  view.rows = growth ? growth->rows() : layer->store.rows();
  view.summaries = growth ? growth->summaries() : layer->store.summaries();
  view.state = state.data() != nullptr ? state.data() : layer->state.data();
  view.row_cache = (row_cache.data() != nullptr ? row_cache : layer->row_cache).as<char>();
  view.generation = layer->generation;
  if (view.kept_capacity > 0) {
    set_kept(view, policy, kept || forgets ? kept.get() : layer->kept.get());
  } else {
    const Tail wanted = Tail::of(view.zone_begin, view.zone_end, policy.tail_rows());
    view.kept = kept      ? kept->as<char>()
                : keeps() ? layer->kept->as<char>()
                          : layer->kept_rows(wanted);
  }
  view.recent = (recent.data() != nullptr ? recent : layer->recent).as<char>();
  view.device = layer->tables.device();
  return view;
}

char* Layer::kept_rows(const Tail& tail) const {
  const bool all = tail.shares_rows(kept_tail) && tail.count <= kept_tail.count;
  return kept && all ? kept->as<char>() : nullptr;
}

Sequence Planner::create(int64_t layers) const {
  Sequence sequence;
  sequence.layers.resize(size_t(layers));
  if (backend_.word_updates() == nullptr) return sequence;
  sequence.device = backend_.arena().allocate(layers * int64_t(sizeof(SequenceView)));
  for (int64_t l = 0; l < layers; ++l) {
    sequence.layers[size_t(l)].tables = DeviceTables(sequence.device.as<SequenceView>() + l);
  }
  return sequence;
}

Positions Planner::observes(const Change& change) const {
  const int64_t begin = policy_.observed().begin;
  return {begin + change.layer->observed, begin + change.observed};
}

Change Planner::plan(Layer& layer, const Regions& next, Use use, bool queries,
                     Stream stream) const {
  Change change{};
  change.layer = &layer;
  change.next = next;
  change.spill_end = next.retrieval_end(sizes_);
  change.spill_begin = std::max(layer.regions.retrieval_end(sizes_), next.sink_end(sizes_));

  const LayerStore::Writes writes{layer.regions.total(), next.total(),          change.spill_begin,
                                  change.spill_end,      next.sink_end(sizes_), change.spill_end};
  if (!layer.store.ready(shape_.segment_tokens, writes)) {
    change.growth = layer.store.planned(shape_.segment_tokens,
                                        {shape_.segment_row_bytes(), policy_.summary_bytes()},
                                        writes, backend_, stream);
  }
  change.tables = layer.tables.grown(change.segments(), backend_.arena());
  // Queries count from the first wanted one on, without a gap.
  const Positions wanted = policy_.observed();
  const int64_t reached = wanted.begin + layer.observed;
  change.observed = layer.observed;
  if (queries && reached >= layer.regions.total()) {
    change.observed = std::max(std::min(next.total(), wanted.end) - wanted.begin, layer.observed);
  }
  if (change.spilled() > 0 || change.observed > layer.observed) {
    change.state = next_state(layer, stream);
  }
  plan_queries(change, use, queries, stream);
  const bool lacks_cache = shape_.cached_rows > 0 && layer.row_cache.data() == nullptr;
  plan_drop(change, use);
  SequenceView after = view_of(next, sizes_, policy_);
  set_dropped(after, change.dropped);
  if (use == Use::kDecode && lacks_cache && after.sparse != 0) {
    change.row_cache = new_row_cache(stream);
  }
  plan_choice(change, after);
  if (offloads_) plan_offload(change, use);
  const bool keeps_tail = offloads_ || backend_.capabilities().keeps_tail;
  if (keeps_tail && after.sparse != 0) plan_kept(change, after, stream);
  return change;
}

void Planner::plan_queries(Change& change, Use use, bool queries, Stream stream) const {
  const Layer& layer = *change.layer;
  change.queries = change.asked = layer.queries;
  const int64_t total = change.next.total(), added = total - layer.regions.total();
  if (shape_.recent == 0 || added == 0) return;
  // Without their queries these tokens leave a gap that no earlier query counts across.
  const bool remembers = queries || use == Use::kDecode;
  if (layer.queries.begin == layer.queries.end || !remembers) {
    change.queries.begin = remembers ? total - added : total;
  }
  change.queries.end = total;
  change.queries.begin = std::max(change.queries.begin, total - shape_.recent);
  if (use == Use::kStore) change.asked = change.queries;  // a decode remembers when it is done
  const bool exists = layer.recent.data() != nullptr;
  // A step remembers when nothing can fail any more.
  const bool in_place = use == Use::kDecode || !backend_.capabilities().verbs_can_fail;
  if (!remembers || (exists && in_place)) return;
  const int64_t bytes = shape_.recent_queries().bytes();
  change.recent = backend_.arena().allocate(bytes);
  if (exists) {
    backend_.copy(change.recent.data(), layer.recent.data(), bytes, stream);
  } else {
    backend_.zero(change.recent.data(), bytes, stream);
  }
}

void Planner::plan_drop(Change& change, Use use) const {
  const Layer& layer = *change.layer;
  change.dropped = layer.dropped;
  const bool decodes = use == Use::kDecode && change.next.total() > layer.regions.total();
  if (!policy_.drops_rows() || !decodes || !layer.kept) return;
  const bool dropped = layer.dropped.begin < layer.dropped.end;
  const bool forgets = change.spilled() > 0 && !change.chooses();
  const SequenceView now = layer.view(sizes_, policy_);
  if (now.sparse == 0 || (forgets && !dropped)) return;
  // Rows that entered the zone before this step: it reads none of them, and can be taken back.
  const int64_t tokens = shape_.segment_tokens;
  const int64_t first = (now.zone_begin + tokens - 1) / tokens, last = now.zone_end / tokens;
  if (first >= last) return;
  change.dropped = {first * tokens, last * tokens};
  change.freed = {dropped ? layer.dropped.end / tokens : first, last};
}

void Planner::plan_choice(Change& change, const SequenceView& next) const {
  const Layer& layer = *change.layer;
  const bool moves = next.kept_capacity > 0 && change.spilled() > 0;
  const bool dropped = change.dropped.begin < change.dropped.end;
  // Without a query to choose by, the latest rows are kept: a zone that lacks rows is never
  // attended to in full.
  if (moves && dropped && !change.chooses()) change.asked = kNobody;
  change.forgets = moves && (next.sparse == 0 || !change.chooses());
  if (!moves || change.forgets) change.asked = {};
  // As many tokens as queries are remembered: their choice is that of all of a prompt.
  change.whole = !dropped && change.next.total() - layer.regions.total() >= shape_.recent;
  if (change.chooses()) change.kept = new_kept(next);
}

std::shared_ptr<Block> Planner::new_kept(const SequenceView& view) const {
  const int64_t rows = shape_.kept(view.kept_capacity).bytes();
  const int64_t bytes = rows + policy_.bytes_beside_kept(view.kept_capacity);
  return std::make_shared<Block>(backend_.arena().allocate(bytes));
}

Block Planner::next_state(const Layer& layer, Stream stream) const {
  const bool exists = layer.state.data() != nullptr;
  const int64_t bytes = policy_.state_bytes();
  if (bytes == 0 || (exists && !backend_.capabilities().verbs_can_fail)) return Block();
  Block state = backend_.arena().allocate(bytes);
  if (exists) {
    backend_.copy(state.data(), layer.state.data(), bytes, stream);
  } else {
    backend_.zero(state.data(), bytes, stream);
  }
  return state;
}

Block Planner::new_row_cache(Stream stream) const {
  const RowCacheLayout layout = shape_.row_cache();
  Block block = backend_.arena().allocate(layout.bytes());
  backend_.zero(block.data(), layout.rows(), stream);
  return block;
}

void Planner::plan_kept(Change& change, const SequenceView& next, Stream stream) const {
  const Layer& layer = *change.layer;
  const int64_t rows = policy_.tail_rows();
  const Tail tail = Tail::of(next.zone_begin, next.zone_end, rows);
  if (tail.count == 0 || layer.kept_rows(tail) != nullptr) return;
  const bool goes_on = layer.kept && tail.shares_rows(layer.kept_tail);
  change.tail = tail;
  change.kept_from = goes_on ? layer.kept_tail.count : 0;
  if (goes_on && layer.kept.use_count() == 1) return;  // rows behind those that count are free
  const int64_t bytes = shape_.kv_heads * Tail::capacity(rows) * shape_.rows.bytes();
  change.kept = std::make_shared<Block>(backend_.arena().allocate(bytes));
  if (goes_on) backend_.copy(change.kept->data(), layer.kept->data(), bytes, stream);
}

void Planner::plan_offload(Change& change, Use use) const {
  const LayerStore& store = change.layer->store;
  const int64_t tokens = shape_.segment_tokens;
  const int64_t zone_begin = change.next.sink_end(sizes_);
  if (change.spilled() <= 0) return;
  // Segments that fill up while decoding are dropped by the next step.
  if (policy_.drops_rows() && use == Use::kDecode && change.chooses()) return;
  for (int64_t s = change.spill_begin / tokens; (s + 1) * tokens <= change.spill_end; ++s) {
    const std::shared_ptr<RowBlock>& rows =
        change.growth ? store.row_block(s, *change.growth) : store.row_block(s);
    if (s * tokens < zone_begin || rows->offloaded() || rows->leaving()) continue;
    change.offloads.push_back({s, rows, backend_.host_arena()->allocate(rows->bytes())});
  }
}

Sequence Planner::fork(const Sequence& sequence, Stream stream) const {
  Sequence copy = create(int64_t(sequence.layers.size()));
  for (size_t l = 0; l < sequence.layers.size(); ++l) {
    const Layer& layer = sequence.layers[l];
    Layer& twin = copy.layers[l];
    twin.regions = layer.regions;
    twin.store = layer.store;
    twin.observed = layer.observed;
    twin.kept = layer.kept;
    twin.kept_tail = layer.kept_tail;
    twin.queries = layer.queries;
    twin.dropped = layer.dropped;
    const auto copy_of = [&](const Block& block) {
      if (block.data() == nullptr) return Block();
      Block other = backend_.arena().allocate(block.bytes());
      backend_.copy(other.data(), block.data(), block.bytes(), stream);
      return other;
    };
    twin.recent = copy_of(layer.recent);
    twin.state = copy_of(layer.state);
  }
  return copy;
}

}  // namespace pariskv
