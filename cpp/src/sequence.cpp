#include "sequence.h"

#include <algorithm>
#include <utility>

namespace pariskv {

namespace {

/** Positions of which no query is ever remembered. */
constexpr Positions kNoQueries = {kMostTokens, kMostTokens + 1};

}  // namespace

StepFacts Change::facts() const {
  StepFacts facts = layer->facts(near_from);
  facts.lacks_rows = any(marks.dropped);
  facts.awaits_choice = forgets_kept || !parts.newer(Part::kKept, layer->parts);
  facts.near = facts.near && !narrow_growth;
  return facts;
}

SequenceView Change::view(const RegionSizes& sizes, const Search& search) const {
  Places places = layer->places();
  if (growth) places.rows = growth->rows(), places.summaries = growth->summaries();
  if (narrow_growth) places.narrow_rows = narrow_growth->rows();
  places.parts = &parts;
  places.marks = &marks;
  SequenceView view = layer->placed(view_of(next, sizes, search, facts()), places, search);
  if (forgets_kept) view[Part::kKept] = nullptr;
  return view;
}

void Change::apply() noexcept {
  if (growth) layer->store.grow(std::move(*growth));
  if (narrow_growth) layer->narrow.grow(std::move(*narrow_growth));
  if (forgets_kept) layer->parts[Part::kKept].reset();
  layer->parts.take(parts);
  layer->regions = next;
  layer->marks = marks;
  layer->store.give_back(freed.begin, freed.end);
  layer->store.give_back_rows(freed_plain.begin, freed_plain.end);
}

int64_t Planner::quiet_steps(const Layer& layer, const StepBatch& batch) const {
  if (shape_.recent > 0) return 0;  // each step remembers a query
  const int64_t searched = searched_from(search_.needs().steps, layer.facts(batch.near_from));
  const int64_t total = layer.regions.total();
  const int64_t buffer = layer.regions.counts(sizes_).buffer;
  const int64_t crossing = total < searched ? searched - 1 : kMostTokens;
  const int64_t steps = std::min(
      {sizes_.update - buffer - 1, crossing - total, layer.store.room_behind(total), batch.holds});
  if (steps <= 0) return 0;
  const SequenceView now = layer.view(sizes_, search_, batch.near_from);
  const SequenceView then =
      view_of(layer.regions.appended(steps), sizes_, search_, layer.facts(batch.near_from));
  const bool alike = now.zone_begin == then.zone_begin && now.zone_end == then.zone_end &&
                     now.mode == then.mode && now.plan.words[0] == then.plan.words[0] &&
                     now.plan.words[1] == then.plan.words[1];
  if (!alike) return 0;
  if (now.dense()) return steps;
  if (lacks_row_cache(layer)) return 0;
  const bool lacks_copies = now[Part::kTailCopies] == nullptr && tail_of(now, search_).count > 0;
  return lacks_copies && !shape_.layout.borrowed ? 0 : steps;
}

bool Planner::lacks_row_cache(const Layer& layer) const {
  return caches_rows(layer) && !layer.parts[Part::kRowCache] &&
         !layer.view(sizes_, search_).dense();
}

Sequence Planner::create(int64_t layers, uint32_t tail_seed) const {
  Sequence sequence;
  sequence.layers.resize(size_t(layers));
  const LayerStore empty({shape_.layout.tokens, shape_.segment_tokens});
  for (int64_t l = 0; l < layers; ++l) {
    Layer& layer = sequence.layers[size_t(l)];
    layer.number = l;
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
  bool enters() const { return any(entering); }
};

Change Planner::plan(Layer& layer, const Regions& next, const Purpose& purpose,
                     Stream stream) const {
  const Positions entering{std::max(layer.regions.retrieval_end(sizes_), next.sink_end(sizes_)),
                           next.retrieval_end(sizes_)};
  const Growing plan{layer, next, purpose.use, entering, stream};
  Change change;
  change.layer = &layer;
  change.next = next;
  change.near_from = purpose.batch.near_from;
  change.marks = layer.marks;
  change.work.entering = entering;
  plan_queries(plan, purpose.queries, change);
  plan_rows(plan, change);
  const int64_t narrow = layer.marks.narrow_end;
  plan_narrow(plan, plan.enters() ? std::max(narrow, entering.end) : narrow, change);
  plan_kept(plan, change);
  plan_offloads(plan, change);
  StepFacts facts = change.facts();
  facts.awaits_choice = false;
  SequenceView after = view_of(next, sizes_, search_, facts);
  if (after.dense()) return change;
  after.tail_seed = layer.tail_seed;
  if (purpose.use == Use::kDecode && caches_rows(layer)) {
    change.parts[Part::kRowCache] = next_part(Part::kRowCache, layer, after, stream);
  }
  if (!shape_.layout.borrowed) plan_tail(plan, after, change);
  return change;
}

void Planner::plan_rows(const Growing& plan, Change& change) const {
  Layer& layer = plan.layer;
  const LayerStore::Writes writes{layer.regions.total(),      plan.next.total(),
                                  plan.entering.begin,        plan.entering.end,
                                  plan.next.sink_end(sizes_), plan.entering.end};
  if (!layer.store.ready(writes)) {
    change.growth = layer.store.planned({shape_.row_block_bytes(), search_.needs().summary_bytes},
                                        writes, backend_, plan.stream);
  }
  change.marks.fetched_end = std::max(layer.marks.fetched_end, plan.entering.end);
  change.tables = layer.tables.grown(change.row_blocks(), backend_.arena());
  if (plan.enters() || change.marks.observed > layer.marks.observed) {
    change.parts[Part::kState] = next_state(layer, plan.stream);
  }
}

void Planner::plan_narrow(const Growing& plan, int64_t end, Change& change) const {
  if (!shape_.narrows()) return;
  Layer& layer = plan.layer;
  const int64_t tokens = shape_.layout.tokens, begin = plan.next.sink_end(sizes_);
  change.marks.narrow_end = end;
  const Positions narrowing{std::max(layer.marks.narrow_end, begin), end};
  change.work.narrowing = narrowing;
  const LayerStore::Writes writes{narrowing.begin, end, 0, 0, 0, (end / tokens + 1) * tokens};
  if (any(narrowing) && !layer.narrow.ready(writes)) {
    change.narrow_growth =
        layer.narrow.planned({shape_.narrow_block_bytes(), 0}, writes, backend_, plan.stream);
  }
  const int64_t first = (begin + tokens - 1) / tokens;
  change.freed_plain = {std::max(first, layer.regions.retrieval_end(sizes_) / tokens),
                        plan.next.retrieval_end(sizes_) / tokens};
}

void Planner::extend_narrow(Change& change, int64_t end, Stream stream) const {
  if (end == change.marks.narrow_end) return;
  const Growing plan{*change.layer, change.next, Use::kStore, change.work.entering, stream};
  plan_narrow(plan, end, change);
  plan_offloads(plan, change);
}

std::optional<LayerStore::Growth> Planner::plan_return(Layer& layer, const Positions& returning,
                                                       Stream stream) const {
  const LayerStore::Writes writes{returning.begin, returning.end, 0, 0, 0, 0};
  if (layer.store.ready(writes)) return std::nullopt;
  return layer.store.planned({shape_.row_block_bytes(), search_.needs().summary_bytes}, writes,
                             backend_, stream);
}

void Planner::plan_queries(const Growing& plan, bool queries, Change& change) const {
  const Layer& layer = plan.layer;
  const Marks& marks = layer.marks;
  // Queries count from the first wanted one on, without a gap.
  const QueryWindows& wanted = search_.needs().observed;
  const int64_t total = plan.next.total();
  if (queries && wanted.at(marks.observed) >= layer.regions.total()) {
    change.marks.observed = std::max(wanted.before(total), marks.observed);
  }
  if (shape_.recent == 0 || plan.added() == 0) return;
  // Without their queries these tokens leave a gap that no earlier query counts across.
  Positions& remembered = change.marks.queries;
  const bool remembers = queries || plan.use == Use::kDecode;
  if (!any(marks.queries) || !remembers) {
    remembered.begin = remembers ? total - plan.added() : total;
  }
  remembered.end = total;
  remembered.begin = std::max(remembered.begin, total - shape_.recent);
  if (!remembers) return;
  // A step remembers when nothing can fail any more.
  const OnWrite how = plan.use == Use::kDecode ? OnWrite::kInPlace : OnWrite::kBeside;
  change.parts[Part::kRecent] = next_part(Part::kRecent, layer, {}, how, plan.stream);
}

/** Sets what is given back. */
void Planner::plan_drop(const Growing& plan, const Positions& asked, Change& change) const {
  const Layer& layer = plan.layer;
  const bool decodes = plan.use == Use::kDecode && plan.added() > 0;
  if (!search_.needs().drops_rows || !decodes || !layer.parts[Part::kKept]) return;
  const bool dropped = any(layer.marks.dropped);
  const bool forgets = plan.enters() && !any(asked);
  const SequenceView now = layer.view(sizes_, search_);
  if (now.dense() || (forgets && !dropped)) return;
  // Rows that entered the zone before this step: it reads none of them, and can be taken back.
  const int64_t tokens = shape_.segment_tokens;
  const int64_t first = (now.zone_begin + tokens - 1) / tokens, last = now.zone_end / tokens;
  if (first >= last) return;
  change.marks.dropped = {first * tokens, last * tokens};
  change.freed = {dropped ? layer.marks.dropped.end / tokens : first, last};
}

void Planner::plan_kept(const Growing& plan, Change& change) const {
  // A decode remembers its query when it is done.
  const Positions asked = plan.use == Use::kStore ? change.marks.queries : plan.layer.marks.queries;
  plan_drop(plan, asked, change);
  const bool dropped = any(change.marks.dropped);
  StepFacts facts;
  facts.lacks_rows = dropped;
  const SequenceView after = view_of(plan.next, sizes_, search_, facts);
  if (after.kept_capacity == 0 || !plan.enters()) return;
  // Without a query to choose by, the latest rows are kept: a zone that lacks rows is never
  // attended to in full.
  change.forgets_kept = after.dense() || (!any(asked) && !dropped);
  if (change.forgets_kept) return;
  change.work.asked = any(asked) ? asked : kNoQueries;
  // As many tokens as queries are remembered: their choice is that of all of a prompt.
  change.work.whole = !dropped && plan.added() >= shape_.recent;
  change.parts[Part::kKept] = next_part(Part::kKept, plan.layer, after, plan.stream);
}

PartBlock Planner::next_part(Part part, const Layer& layer, const SequenceView& view, OnWrite how,
                             Stream stream) const {
  const PartBlock& own = layer.parts[part];
  const PartSize size = part_size(part, shape_, search_, view);
  const bool in_place = how == OnWrite::kInPlace ||
                        (how == OnWrite::kBeside && !backend_.capabilities().verbs_can_fail) ||
                        (how == OnWrite::kBehind && own.use_count() == 1);
  if (size.bytes == 0 || (own && in_place)) return nullptr;
  if (own && how != OnWrite::kAnew) return copy_of(*own, stream);
  auto block = std::make_shared<Block>(backend_.arena().allocate(size.bytes, rules_of(part).holds));
  if (size.zeros > 0) backend_.zero(block->data(), size.zeros, stream);
  return block;
}

PartBlock Planner::copy_of(const Block& block, Stream stream) const {
  auto copy = std::make_shared<Block>(backend_.arena().allocate(block.bytes(), block.holds()));
  backend_.copy(copy->data(), block.data(), block.bytes(), stream);
  return copy;
}

void Planner::plan_tail(const Growing& plan, const SequenceView& next, Change& change) const {
  const Layer& layer = plan.layer;
  const Marks& marks = layer.marks;
  const Tail tail = tail_of(next, search_);
  const bool there = layer.parts[Part::kTailCopies] != nullptr;
  if (tail.count == 0 || (there && marks.has_copies(tail, search_))) return;
  change.marks.copied = tail;
  change.marks.common = common_rows(tail.count, search_.needs().tail_rows);
  const bool goes_on = there && tail.shares_rows(marks.copied) && tail.count > marks.copied.count &&
                       marks.common == change.marks.common;
  change.work.tail_from = goes_on ? marks.copied.count : 0;
  change.parts[Part::kTailCopies] = next_part(
      Part::kTailCopies, layer, next, goes_on ? OnWrite::kBehind : OnWrite::kAnew, plan.stream);
}

void Planner::plan_offloads(const Growing& plan, Change& change) const {
  change.offloads.clear();
  if (!offloads_ || !plan.enters()) return;
  const LayerStore& store = plan.layer.zone_rows(shape_);
  const auto& growth = shape_.narrows() ? change.narrow_growth : change.growth;
  const int64_t tokens = shape_.segment_tokens;
  const int64_t zone_begin = plan.next.sink_end(sizes_);
  // Segments that fill up while decoding are dropped by the next step.
  const bool chooses = change.work.chooses();
  if (search_.needs().drops_rows && plan.use == Use::kDecode && chooses) return;
  for (int64_t s = plan.entering.begin / tokens; (s + 1) * tokens <= plan.entering.end; ++s) {
    const std::shared_ptr<RowBlock>& block =
        growth ? store.row_block(s, *growth) : store.row_block(s);
    if (s * tokens < zone_begin || block->offloaded() || block->leaving()) continue;
    change.offloads.push_back({s, block, backend_.host_arena()->allocate(block->bytes())});
  }
}

}  // namespace pariskv
