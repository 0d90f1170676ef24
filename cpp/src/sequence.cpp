#include "sequence.h"

#include <algorithm>
#include <utility>

namespace pariskv {

SequenceView view_of(const Regions& regions, const RegionSizes& sizes, const Search& search,
                     StepFacts facts) {
  SequenceView view{};
  view.total = regions.total();
  view.zone_begin = regions.sink_end(sizes);
  view.zone_end = regions.retrieval_end(sizes);
  view.kept_capacity = search.kept_rows(view.zone_tokens());
  facts.total = view.total;
  facts.leaves_out = search.plan(view);
  facts.awaits_choice &= view.kept_capacity > 0 && search.needs().waits_for_kept;
  view.mode = mode_of(search.needs().steps, facts);
  return view;
}

namespace {

void set_kept(SequenceView& view, const Block* kept) {
  if (view.kept_capacity > 0 && kept != nullptr) view.kept = kept->as<char>();
}

bool any(const Positions& positions) { return positions.begin < positions.end; }

Tail tail_of(const SequenceView& view, const Search& search) {
  return Tail::of(view.zone_begin, view.zone_end, search.needs().tail_rows,
                  uint32_t(view.tail_seed));
}

int64_t common_of(const Tail& tail, const Search& search) {
  return common_rows(tail.count, search.needs().tail_rows);
}

const Block& newer(const Block& next, const Block& own) { return next.data() ? next : own; }

/** Positions of which no query is ever remembered. */
constexpr Positions kNoQueries = {kMostTokens, kMostTokens + 1};

}  // namespace

StepFacts Layer::facts(int64_t heads) const {
  StepFacts facts;
  facts.lacks_rows = any(dropped);
  facts.awaits_choice = kept == nullptr;
  facts.near = narrow.rows() == nullptr && !store.has_moved();
  facts.heads = heads;
  return facts;
}

StepFacts Change::facts() const {
  StepFacts facts = layer->facts(heads);
  facts.lacks_rows = any(kept.dropped);
  facts.awaits_choice = kept_rows() == nullptr;
  facts.near = facts.near && !narrow.growth;
  return facts;
}

SequenceView Layer::view(const RegionSizes& sizes, const Search& search, int64_t heads) const {
  SequenceView view = placed(view_of(regions, sizes, search, facts(heads)), search);
  set_kept(view, kept.get());
  return view;
}

SequenceView Layer::cut(const Regions& next, const RegionSizes& sizes, const Search& search) const {
  StepFacts after = facts(0);
  after.lacks_rows = any(dropped_of(next));
  after.awaits_choice = false;
  return placed(view_of(next, sizes, search, after), search);
}

SequenceView Layer::placed(SequenceView view, const Search& search) const {
  view.rows = store.rows();
  view.summaries = store.summaries();
  view.state = state.data();
  view.row_cache = row_cache.as<char>();
  view.generation = generation;
  view.tail_seed = tail_seed;
  view.tail_copies = copies_of(tail_of(view, search), search);
  view.recent = recent.as<char>();
  view.device = tables.device();
  view.narrow_rows = narrow.rows();
  return view;
}

SequenceView Change::view(const RegionSizes& sizes, const Search& search) const {
  SequenceView view = view_of(next, sizes, search, facts());
  view.rows = rows.growth ? rows.growth->rows() : layer->store.rows();
  view.summaries = rows.growth ? rows.growth->summaries() : layer->store.summaries();
  view.state = newer(rows.state, layer->state).data();
  view.row_cache = newer(rows.row_cache, layer->row_cache).as<char>();
  view.generation = layer->generation;
  view.tail_seed = layer->tail_seed;
  view.tail_copies = tail.copies         ? tail.copies->as<char>()
                     : tail.copies_any() ? layer->tail_copies->as<char>()
                                         : layer->copies_of(tail_of(view, search), search);
  set_kept(view, kept_rows());
  view.recent = newer(queries.recent, layer->recent).as<char>();
  view.device = layer->tables.device();
  view.narrow_rows = narrow.growth ? narrow.growth->rows() : layer->narrow.rows();
  return view;
}

char* Layer::copies_of(const Tail& tail, const Search& search) const {
  const bool all =
      tail.shares_rows(copied) && tail.count <= copied.count && common == common_of(tail, search);
  return tail_copies && all ? tail_copies->as<char>() : nullptr;
}

void RowsChange::apply(Layer& layer) noexcept {
  if (growth) layer.store.grow(std::move(*growth));
  if (state.data() != nullptr) layer.state = std::move(state);
  if (row_cache.data() != nullptr) layer.row_cache = std::move(row_cache);
  layer.fetched_end = std::max(layer.fetched_end, entering.end);
}

void NarrowChange::apply(Layer& layer) noexcept {
  if (growth) layer.narrow.grow(std::move(*growth));
  layer.narrow_end = end;
  layer.store.give_back_rows(freed.begin, freed.end);
}

void QueriesChange::apply(Layer& layer) noexcept {
  if (recent.data() != nullptr) layer.recent = std::move(recent);
  layer.queries = remembered;
  layer.observed = observed;
}

void KeptRowsChange::apply(Layer& layer) noexcept {
  if (kept || forgets) layer.kept = std::move(kept);
  layer.dropped = dropped;
  layer.store.give_back(freed.begin, freed.end);
}

void TailChange::apply(Layer& layer) noexcept {
  if (copies_any()) layer.copied = tail, layer.common = common;
  if (copies) layer.tail_copies = std::move(copies);
}

void Change::apply() noexcept {
  rows.apply(*layer);
  layer->regions = next;
  queries.apply(*layer);
  tail.apply(*layer);
  kept.apply(*layer);
  narrow.apply(*layer);
}

int64_t Planner::quiet_steps(const Layer& layer, int64_t heads) const {
  if (shape_.recent > 0) return 0;  // each step remembers a query
  const int64_t searched = searched_from(search_.needs().steps, layer.facts(heads));
  const int64_t total = layer.regions.total();
  const int64_t buffer = layer.regions.counts(sizes_).buffer;
  const int64_t crossing = total < searched ? searched - 1 : kMostTokens;
  const int64_t steps =
      std::min({sizes_.update - buffer - 1, crossing - total, layer.store.room_behind(total)});
  if (steps <= 0) return 0;
  const SequenceView now = layer.view(sizes_, search_, heads);
  const SequenceView then =
      view_of(layer.regions.appended(steps), sizes_, search_, layer.facts(heads));
  const bool alike = now.zone_begin == then.zone_begin && now.zone_end == then.zone_end &&
                     now.mode == then.mode && now.plan.words[0] == then.plan.words[0] &&
                     now.plan.words[1] == then.plan.words[1];
  if (!alike) return 0;
  if (now.dense()) return steps;
  if (lacks_row_cache(layer)) return 0;
  const bool lacks_copies = now.tail_copies == nullptr && tail_of(now, search_).count > 0;
  return lacks_copies && !shape_.layout.borrowed ? 0 : steps;
}

bool Planner::lacks_row_cache(const Layer& layer) const {
  return caches_rows(layer) && layer.row_cache.data() == nullptr &&
         !layer.view(sizes_, search_).dense();
}

Sequence Planner::create(int64_t layers, uint32_t tail_seed) const {
  Sequence sequence;
  sequence.layers.resize(size_t(layers));
  const LayerStore empty({shape_.layout.tokens, shape_.segment_tokens});
  for (Layer& layer : sequence.layers) {
    layer.store = layer.narrow = empty;
    layer.tail_seed = tail_seed;
  }
  if (backend_.word_updates() == nullptr) return sequence;
  sequence.device = backend_.arena().allocate(layers * int64_t(sizeof(SequenceView)));
  for (int64_t l = 0; l < layers; ++l) {
    sequence.layers[size_t(l)].tables =
        DeviceTables(sequence.device.as<SequenceView>() + l, shape_.narrows());
  }
  return sequence;
}

/** A layer, where it is to get, and what for. */
struct Planner::Growing {
  Layer& layer;
  const Regions& next;
  Use use;
  Positions entering;  // the zone
  Stream stream;

  int64_t added() const { return next.total() - layer.regions.total(); }
  bool enters() const { return entering.begin < entering.end; }
};

Change Planner::plan(Layer& layer, const Regions& next, const Purpose& purpose,
                     Stream stream) const {
  const Positions entering{std::max(layer.regions.retrieval_end(sizes_), next.sink_end(sizes_)),
                           next.retrieval_end(sizes_)};
  const Growing plan{layer, next, purpose.use, entering, stream};
  Change change{&layer, next, {}, {}, {}, {}, {}, purpose.heads};
  change.queries = plan_queries(plan, purpose.queries);
  change.rows = plan_rows(plan, change.queries);
  const int64_t narrow_end =
      plan.enters() ? std::max(layer.narrow_end, entering.end) : layer.narrow_end;
  if (shape_.narrows()) change.narrow = plan_narrow(layer, next, narrow_end, stream);
  change.kept = plan_kept(plan, change.queries.asked);
  if (offloads_) change.rows.offloads = plan_offloads(plan, change);
  StepFacts facts = change.facts();
  facts.awaits_choice = false;
  SequenceView after = view_of(next, sizes_, search_, facts);
  if (after.dense()) return change;
  after.tail_seed = layer.tail_seed;
  const bool lacks_cache = caches_rows(layer) && layer.row_cache.data() == nullptr;
  if (purpose.use == Use::kDecode && lacks_cache) change.rows.row_cache = new_row_cache(stream);
  if (!shape_.layout.borrowed) change.tail = plan_tail(plan, after);
  return change;
}

RowsChange Planner::plan_rows(const Growing& plan, const QueriesChange& queries) const {
  RowsChange rows;
  Layer& layer = plan.layer;
  rows.entering = plan.entering;
  const LayerStore::Writes writes{layer.regions.total(),      plan.next.total(),
                                  plan.entering.begin,        plan.entering.end,
                                  plan.next.sink_end(sizes_), plan.entering.end};
  if (!layer.store.ready(writes)) {
    rows.growth = layer.store.planned({shape_.row_block_bytes(), search_.needs().summary_bytes},
                                      writes, backend_, plan.stream);
  }
  const int64_t blocks = rows.growth ? rows.growth->row_blocks() : layer.store.row_blocks();
  rows.tables = layer.tables.grown(blocks, backend_.arena());
  if (plan.enters() || queries.observed > layer.observed) {
    rows.state = next_state(layer, plan.stream);
  }
  return rows;
}

NarrowChange Planner::plan_narrow(Layer& layer, const Regions& next, int64_t end,
                                  Stream stream) const {
  const int64_t tokens = shape_.layout.tokens, begin = next.sink_end(sizes_);
  NarrowChange change;
  change.end = end;
  change.entering = {std::max(layer.narrow_end, begin), end};
  const LayerStore::Writes writes{change.entering.begin, end, 0, 0, 0, (end / tokens + 1) * tokens};
  if (change.entering.begin < end && !layer.narrow.ready(writes)) {
    change.growth =
        layer.narrow.planned({shape_.narrow_block_bytes(), 0}, writes, backend_, stream);
  }
  const int64_t first = (begin + tokens - 1) / tokens;
  change.freed = {std::max(first, layer.regions.retrieval_end(sizes_) / tokens),
                  next.retrieval_end(sizes_) / tokens};
  return change;
}

void Planner::extend_narrow(Change& change, int64_t end, Stream stream) const {
  if (!shape_.narrows()) return;
  change.narrow = plan_narrow(*change.layer, change.next, end, stream);
  const Growing plan{*change.layer, change.next, Use::kStore, change.rows.entering, stream};
  if (offloads_) change.rows.offloads = plan_offloads(plan, change);
}

std::optional<LayerStore::Growth> Planner::plan_return(Layer& layer, const Positions& returning,
                                                       Stream stream) const {
  const LayerStore::Writes writes{returning.begin, returning.end, 0, 0, 0, 0};
  if (layer.store.ready(writes)) return std::nullopt;
  return layer.store.planned({shape_.row_block_bytes(), search_.needs().summary_bytes}, writes,
                             backend_, stream);
}

QueriesChange Planner::plan_queries(const Growing& plan, bool queries) const {
  const Layer& layer = plan.layer;
  QueriesChange change;
  change.remembered = change.asked = layer.queries;
  change.observed = layer.observed;
  // Queries count from the first wanted one on, without a gap.
  const QueryWindows& wanted = search_.needs().observed;
  const int64_t total = plan.next.total();
  if (queries && wanted.at(layer.observed) >= layer.regions.total()) {
    change.observed = std::max(wanted.before(total), layer.observed);
  }
  if (shape_.recent == 0 || plan.added() == 0) return change;
  // Without their queries these tokens leave a gap that no earlier query counts across.
  Positions& remembered = change.remembered;
  const bool remembers = queries || plan.use == Use::kDecode;
  if (layer.queries.begin == layer.queries.end || !remembers) {
    remembered.begin = remembers ? total - plan.added() : total;
  }
  remembered.end = total;
  remembered.begin = std::max(remembered.begin, total - shape_.recent);
  if (plan.use == Use::kStore) change.asked = remembered;  // a decode remembers when it is done
  const bool exists = layer.recent.data() != nullptr;
  // A step remembers when nothing can fail any more.
  const bool in_place = plan.use == Use::kDecode || !backend_.capabilities().verbs_can_fail;
  if (!remembers || (exists && in_place)) return change;
  const int64_t bytes = shape_.recent_queries().bytes();
  change.recent = backend_.arena().allocate(bytes, Holds::kKept);
  if (exists) {
    backend_.copy(change.recent.data(), layer.recent.data(), bytes, plan.stream);
  } else {
    backend_.zero(change.recent.data(), bytes, plan.stream);
  }
  return change;
}

/** Sets what is given back. */
void Planner::plan_drop(const Growing& plan, const Positions& asked, KeptRowsChange& kept) const {
  const Layer& layer = plan.layer;
  kept.dropped = layer.dropped;
  const bool decodes = plan.use == Use::kDecode && plan.added() > 0;
  if (!search_.needs().drops_rows || !decodes || !layer.kept) return;
  const bool dropped = layer.dropped.begin < layer.dropped.end;
  const bool forgets = plan.enters() && asked.begin >= asked.end;
  const SequenceView now = layer.view(sizes_, search_);
  if (now.dense() || (forgets && !dropped)) return;
  // Rows that entered the zone before this step: it reads none of them, and can be taken back.
  const int64_t tokens = shape_.segment_tokens;
  const int64_t first = (now.zone_begin + tokens - 1) / tokens, last = now.zone_end / tokens;
  if (first >= last) return;
  kept.dropped = {first * tokens, last * tokens};
  kept.freed = {dropped ? layer.dropped.end / tokens : first, last};
}

KeptRowsChange Planner::plan_kept(const Growing& plan, const Positions& asked) const {
  KeptRowsChange kept;
  plan_drop(plan, asked, kept);
  const bool dropped = any(kept.dropped);
  StepFacts facts;
  facts.lacks_rows = dropped;
  const SequenceView after = view_of(plan.next, sizes_, search_, facts);
  if (after.kept_capacity == 0 || !plan.enters()) return kept;
  // Without a query to choose by, the latest rows are kept: a zone that lacks rows is never
  // attended to in full.
  const bool has_queries = asked.begin < asked.end;
  kept.forgets = after.dense() || (!has_queries && !dropped);
  if (kept.forgets) return kept;
  kept.asked = has_queries ? asked : kNoQueries;
  // As many tokens as queries are remembered: their choice is that of all of a prompt.
  kept.whole = !dropped && plan.added() >= shape_.recent;
  kept.kept = new_kept(after);
  return kept;
}

std::shared_ptr<Block> Planner::new_kept(const SequenceView& view) const {
  const int64_t bytes = search_.kept_block_bytes(view.kept_capacity);
  return std::make_shared<Block>(backend_.arena().allocate(bytes, Holds::kKept));
}

Block Planner::next_state(const Layer& layer, Stream stream) const {
  const bool exists = layer.state.data() != nullptr;
  const int64_t bytes = search_.needs().state_bytes;
  if (bytes == 0 || (exists && !backend_.capabilities().verbs_can_fail)) return Block();
  Block state = backend_.arena().allocate(bytes, Holds::kSummaries);
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

TailChange Planner::plan_tail(const Growing& plan, const SequenceView& next) const {
  const Layer& layer = plan.layer;
  TailChange change;
  const Tail tail = tail_of(next, search_);
  if (tail.count == 0 || layer.copies_of(tail, search_) != nullptr) return change;
  change.tail = tail;
  change.common = common_of(tail, search_);
  const bool goes_on = layer.tail_copies && tail.shares_rows(layer.copied) &&
                       tail.count > layer.copied.count && layer.common == change.common;
  change.from = goes_on ? layer.copied.count : 0;
  if (goes_on && layer.tail_copies.use_count() == 1) return change;  // free behind those that count
  const int64_t bytes = shape_.tail_copies(Tail::capacity(search_.needs().tail_rows)).bytes();
  change.copies = std::make_shared<Block>(backend_.arena().allocate(bytes, Holds::kKept));
  if (goes_on) {
    backend_.copy(change.copies->data(), layer.tail_copies->data(), bytes, plan.stream);
  }
  return change;
}

std::vector<PlannedOffload> Planner::plan_offloads(const Growing& plan,
                                                   const Change& change) const {
  std::vector<PlannedOffload> offloads;
  const LayerStore& store = plan.layer.zone_rows(shape_);
  const auto& growth = shape_.narrows() ? change.narrow.growth : change.rows.growth;
  const int64_t tokens = shape_.segment_tokens;
  const int64_t zone_begin = plan.next.sink_end(sizes_);
  if (!plan.enters()) return offloads;
  // Segments that fill up while decoding are dropped by the next step.
  const bool chooses = change.kept.chooses();
  if (search_.needs().drops_rows && plan.use == Use::kDecode && chooses) return offloads;
  for (int64_t s = plan.entering.begin / tokens; (s + 1) * tokens <= plan.entering.end; ++s) {
    const std::shared_ptr<RowBlock>& block =
        growth ? store.row_block(s, *growth) : store.row_block(s);
    if (s * tokens < zone_begin || block->offloaded() || block->leaving()) continue;
    offloads.push_back({s, block, backend_.host_arena()->allocate(block->bytes())});
  }
  return offloads;
}

}  // namespace pariskv
