#include "sequence.h"

#include <algorithm>

namespace pariskv {

namespace {

SequenceView view_of(const Regions& regions, const RegionSizes& sizes, const Policy& policy) {
  SequenceView view{};
  view.total = regions.total();
  view.zone_begin = regions.sink_end(sizes);
  view.zone_end = regions.retrieval_end(sizes);
  policy.plan(view);
  return view;
}

}  // namespace

SequenceView Layer::view(const RegionSizes& sizes, const Policy& policy) const {
  SequenceView view = view_of(regions, sizes, policy);
  view.rows = store.rows();
  view.summaries = store.summaries();
  view.state = state.data();
  view.row_cache = row_cache.as<char>();
  view.generation = generation;
  view.kept = kept_rows(Tail::of(view.zone_begin, view.zone_end, policy.tail_rows()));
  view.device = tables.device();
  return view;
}

SequenceView Change::view(const RegionSizes& sizes, const Policy& policy) const {
  SequenceView view = view_of(next, sizes, policy);
  view.rows = growth ? growth->rows() : layer->store.rows();
  view.summaries = growth ? growth->summaries() : layer->store.summaries();
  view.state = state.data() != nullptr ? state.data() : layer->state.data();
  view.row_cache = (row_cache.data() != nullptr ? row_cache : layer->row_cache).as<char>();
  view.generation = layer->generation;
  const Tail wanted = Tail::of(view.zone_begin, view.zone_end, policy.tail_rows());
  view.kept = kept      ? kept->as<char>()
              : keeps() ? layer->kept->as<char>()
                        : layer->kept_rows(wanted);
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
  const bool lacks_cache = shape_.cached_rows > 0 && layer.row_cache.data() == nullptr;
  const SequenceView after = view_of(next, sizes_, policy_);
  if (use == Use::kDecode && lacks_cache && after.sparse != 0) {
    change.row_cache = new_row_cache(stream);
  }
  if (offloads_) plan_offload(change);
  if (offloads_ && after.sparse != 0) plan_kept(change, after, stream);
  return change;
}

Block Planner::next_state(const Layer& layer, Stream stream) const {
  const bool exists = layer.state.data() != nullptr;
  if (exists && !backend_.capabilities().launches_can_fail) return Block();
  Block state = backend_.arena().allocate(policy_.state_bytes());
  if (exists) {
    backend_.copy(state.data(), layer.state.data(), policy_.state_bytes(), stream);
  } else {
    backend_.zero(state.data(), policy_.state_bytes(), stream);
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

void Planner::plan_offload(Change& change) const {
  const LayerStore& store = change.layer->store;
  const int64_t tokens = shape_.segment_tokens;
  const int64_t zone_begin = change.next.sink_end(sizes_);
  if (change.spilled() <= 0) return;
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
    if (layer.state.data() == nullptr) continue;
    twin.state = backend_.arena().allocate(layer.state.bytes());
    backend_.copy(twin.state.data(), layer.state.data(), layer.state.bytes(), stream);
  }
  return copy;
}

}  // namespace pariskv
