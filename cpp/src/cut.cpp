// Sequences that lose their last tokens, and forks that hold the first ones of another.
#include <algorithm>

#include "cache_impl.h"

namespace pariskv {

/**
 * A layer on its way to fewer tokens. `from` is looked at, `to` is written: they are the same
 * layer, or `to` is a fork of `from` that has its regions already.
 */
struct Cache::Impl::Shorter {
  Layer* from;
  Layer* to;
  Regions regions;
  PartBlock state{};                         // null: that of `to` stays
  bool cuts = false;                         // the zone
  PartBlock kept{};                          // of the zone, where it is cut; null: nothing is
  std::optional<LayerStore::Growth> rows{};  // that come back from it, where they are not yet
};

Regions Cache::Impl::shortened(const Verb& verb, const char* argument, Cut::Counts counts,
                               const Layer& layer, SequenceId sequence, int64_t tokens) const {
  const int64_t total = layer.regions.total();
  const bool keeps = counts == Cut::Counts::kKept;
  const Regions next = layer.regions.truncated(keeps ? total - tokens : tokens, sizes_);
  const Positions dropped = layer.marks.dropped_of(next.total());
  if (next.retrieval_end(sizes_) < dropped.end) {
    verb.refuse_cut(argument, counts, sequence, dropped, total, next.total());
  }
  return next;
}

void Cache::Impl::cut(std::vector<Shorter>& layers, Stream stream) {
  // All that may fail first, on states beside the present ones.
  std::vector<NarrowJob> returning;
  for (Shorter& shorter : layers) {
    if (!shape_.narrows()) break;
    SequenceView view = this->view(*shorter.from);
    const Positions rows{std::max(shorter.regions.retrieval_end(sizes_), view.zone_begin),
                         std::min(shorter.regions.total(), view.zone_end)};
    if (rows.begin >= rows.end) continue;
    shorter.rows = planner_.plan_return(*shorter.to, rows, stream);
    view.rows = shorter.rows ? shorter.rows->rows() : shorter.to->store.rows();
    returning.push_back({view, rows});
  }
  std::vector<KeptChange> choices;
  for (Shorter& shorter : layers) {
    Layer& layer = *shorter.from;
    const bool forks = shorter.to != shorter.from;
    publish(layer, stream);
    SequenceView view = this->view(layer);
    const int64_t begin = std::max(shorter.regions.retrieval_end(sizes_), view.zone_begin);
    if (begin >= view.zone_end) continue;
    shorter.cuts = true;
    if (planner_.keeps_state(layer, shorter.regions)) {
      if (!forks) shorter.state = planner_.next_state(layer, stream);  // a fork has its own
      const PartBlock& own = shorter.to->parts[Part::kState];
      view[Part::kState] = data_of(shorter.state ? shorter.state : own);
      search_->leave({view, begin, view.zone_end}, stream);
    }
    SequenceView after = layer.cut(shorter.regions, sizes_, *search_);
    if (view.kept_capacity == 0 || !view[Part::kKept] || after.dense()) continue;
    // Rows are chosen anew by the queries that are left. Where rows were given back there is
    // nothing to choose from but the kept rows, and the zone cannot end among dropped ones.
    const Positions asked{layer.marks.queries.begin,
                          std::min(layer.marks.queries.end, shorter.regions.total())};
    const Positions dropped = layer.marks.dropped_of(shorter.regions.total());
    const bool trims = any(dropped);
    if (!trims && !any(asked)) continue;
    shorter.kept = planner_.next_part(Part::kKept, layer, after, stream);
    after[Part::kKept] = shorter.kept->as<char>();
    choices.push_back({view, after, asked, !trims, trims});
  }
  if (!choices.empty()) {
    search_->reserve_choice(choices);
    search_->choose(choices, stream);
  }
  if (!returning.empty()) {
    backend_->widen({shape_, int64_t(returning.size()), returning.data()}, stream);
  }
  for (const KeptChange& choice : choices) stats_.keeps += choice.trims ? 0 : 1;
  for (Shorter& shorter : layers) {
    Layer& layer = *shorter.to;
    if (shorter.state) layer.parts[Part::kState] = std::move(shorter.state);
    if (shorter.cuts) layer.parts[Part::kKept] = std::move(shorter.kept);
    if (shorter.rows) layer.store.grow(std::move(*shorter.rows));
    planner_.shorten(layer, shorter.regions);
  }
}

void Cache::truncate(const Batch& sequences, const Cut& cut, Stream stream) {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("truncate");
  const std::vector<Sequence*> batch = impl_->find(verb, sequences);
  const char* argument = cut.counts == Cut::Counts::kKept ? "keep" : "drop";
  verb.check_batch_size(argument, int64_t(cut.tokens.size()), int64_t(batch.size()));
  std::vector<Impl::Shorter> next;
  for (size_t i = 0; i < batch.size(); ++i) {
    const int64_t tokens = cut.tokens[i];
    const SequenceId id = sequences.ids()[i];
    for (Layer& layer : batch[i]->layers) {
      const int64_t total = layer.regions.total();
      if (tokens < 0 || tokens > total) {
        fail("[truncate] ", argument, ": expected 0 to ", total, ", the tokens of sequence ", id,
             ", got ", tokens);
      }
      next.push_back(
          {&layer, &layer, impl_->shortened(verb, argument, cut.counts, layer, id, tokens)});
    }
  }
  const Impl::Visit visit(*impl_, stream);
  impl_->cut(next, stream);
}

SequenceId Cache::fork_prefix(SequenceId sequence, int64_t tokens, Stream stream) {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("fork");
  Sequence& source = *impl_->find(verb, {sequence})[0];
  std::vector<Regions> regions;
  for (const Layer& layer : source.layers) {
    const int64_t total = layer.regions.total();
    if (total == 0) {
      fail("[fork] tokens: expected a sequence that has tokens, got ", sequence,
           ", which has none in layer ", regions.size(), "; leave tokens out to fork it");
    }
    if (tokens < 1 || tokens > total) {
      fail("[fork] tokens: expected 1 to ", total, ", the tokens of sequence ", sequence,
           " in layer ", regions.size(), ", got ", tokens);
    }
    regions.push_back(
        impl_->shortened(verb, "tokens", Cut::Counts::kKept, layer, sequence, tokens));
  }
  const Impl::Visit visit(*impl_, stream);
  impl_->sequences_.emplace(impl_->next_id_, impl_->making_room(stream, [&] {
    Sequence prefix = impl_->planner_.fork(source, stream, &regions);
    std::vector<Impl::Shorter> layers;
    for (size_t l = 0; l < regions.size(); ++l) {
      layers.push_back({&source.layers[l], &prefix.layers[l], regions[l]});
    }
    impl_->cut(layers, stream);
    return prefix;
  }));
  return impl_->next_id_++;
}

}  // namespace pariskv
