// A step of a batch, in one layer or in all: by decode, or by advance before its replay.
#include <algorithm>

#include "cache_impl.h"

namespace pariskv {

void Cache::Impl::open_step(const Verb& verb, const Batch& batch, LayerRange range) {
  const Batch::Prepared* prepared = batch.prepared_.get();
  const bool foreign = prepared != nullptr && prepared->cache != number_;
  if (!foreign && cursor_.knows(batch.ids(), range)) {
    ++calls_;
    return;
  }
  cursor_.add(batch.ids(), find(verb, batch, IdleSlots::kAllowed), range);
}

void Cache::Impl::take_step(LayerRange range, int64_t tokens, const StepWork& work, Stream stream) {
  const int64_t left = cursor_.left(range);
  cursor_.note(calls_);
  if (left < tokens) return take_planned_step(range, tokens, work, stream);
  const std::vector<SequenceView*>& places = cursor_.places(range);
  offload_pace_.start_beside(true, stream);
  cursor_.count(range, tokens);
  try {
    if (tokens > 0) {
      backend_->word_updates()->add_token(places.data(), int64_t(places.size()), range.count,
                                          stream);
    }
    if (work.launch) work.launch(cursor_.layer(range.first).views);
    if (work.sets_lengths) set_lengths(cursor_.in_full(), 0, stream);
  } catch (...) {
    cursor_.count(range, -tokens);
    forget(range);
    throw;
  }
  stats_.searched_tokens += cursor_.searched(range);
  stats_.decode_tokens += int64_t(places.size()) * range.count;
}

/** What changes by more than its length in a step, and the views of it all. */
struct Cache::Impl::PlannedStep {
  std::vector<BatchLayer*> layers;
  std::vector<size_t> due;             // numbers of sequences, see BatchLayer
  std::vector<SequenceView*> counted;  // the others, in the device's memory
  std::vector<SequenceView> views;     // (slots) of the only layer, for its launch
  std::vector<int64_t> slots_due;      // of those that are due
  Step step;                           // (layers, due)

  const Slots& slots() const { return layers.front()->slots; }
  void look(int64_t tokens) {
    due.clear(), counted.clear(), slots_due.clear();
    for (size_t i = 0; i < slots().layers.size(); ++i) {
      const bool is_due = std::any_of(layers.begin(), layers.end(), [&](const BatchLayer* layer) {
        return layer->due(i, tokens);
      });
      if (is_due) due.push_back(i), slots_due.push_back(slots().numbers[i]);
      if (!is_due && tokens > 0) counted.push_back(layers.front()->places[i]);
    }
  }
  bool all_due() const { return due.size() == slots().layers.size(); }
  /** Whether all layers of a sequence that is due will be attended to in full, and are near. */
  bool in_full(size_t number) const {
    for (size_t l = 0; l < layers.size(); ++l) {
      if (!in_full(number, l)) return false;
    }
    return true;
  }
  bool in_full(size_t number, size_t l) const {
    const size_t i = l * due.size() + number;
    return step.views[i].dense() && step.changes[i].facts().near;
  }
  /** Views of all slots of one layer, after so many tokens. */
  void spread(const std::vector<SequenceView>& changed, int64_t tokens) {
    views = layers.front()->views;
    for (const int64_t slot : slots().numbers) views[size_t(slot)].total += tokens;
    for (size_t n = 0; n < due.size(); ++n) views[size_t(slots_due[n])] = changed[n];
  }
};

StepBatch Cache::Impl::batch_of(const BatchLayer& at, int64_t tokens) const {
  const StepRules& rules = search_->needs().steps;
  if (!rules.look_at_batch()) return {};
  StepSum sum(rules, page_tables_.has_value(), config_.kv_heads);
  for (size_t i = 0; i < at.slots.layers.size(); ++i) {
    sum.add(at.view(i).total + tokens, at.slots.layers[i]->near());
  }
  return sum.decided();
}

void Cache::Impl::set_lengths(const std::vector<bool>& in_full, int64_t tokens, Stream stream) {
  const Slots& slots = cursor_.slots();
  std::vector<int32_t> lengths(size_t(slots.all), 0);
  for (size_t i = 0; i < in_full.size(); ++i) {
    const int64_t total = cursor_.total(i) + tokens;
    if (search_->needs().leaves_dense && page_tables_->serve(in_full[i], total)) {
      lengths[size_t(slots.numbers[i])] = int32_t(total);
    }
  }
  page_tables_->set_lengths(std::move(lengths), stream);
}

void Cache::Impl::plan_step(PlannedStep& planned, int64_t tokens, const StepWork& work,
                            Stream stream) {
  for (planned.look(tokens);;) {
    std::vector<Layer*> layers;
    std::vector<Regions> next;
    for (const BatchLayer* layer : planned.layers) {
      for (const size_t i : planned.due) {
        layer->settle(i);
        layers.push_back(layer->slots.layers[i]);
        const Regions& regions = layers.back()->regions;
        next.push_back(tokens > 0 ? regions.grown(tokens, sizes_) : regions);
      }
    }
    const auto reserve = [&](Step& step) {
      if (work.launch) planned.spread(step.views, tokens);
      // Where graphs are, kernels know idle slots; elsewhere a step is made without them, and all
      // sequences are always due.
      const bool whole = backend_->capabilities().graphs, all = planned.all_due();
      DecodeArgs args = work.args;
      args.batch = whole ? planned.slots().all : planned.slots().size();
      if (whole && !all) args.changed = &planned.slots_due;
      std::vector<SequenceView> spread;
      for (size_t l = 0; l < planned.layers.size(); ++l, ++args.layer) {
        args.sequences = step.views.data() + l * planned.due.size();
        if (whole && all) {
          spread = planned.slots().spread(args.sequences);
          args.sequences = spread.data();
        }
        if (whole || args.batch > 0) search_->reserve(args);
      }
    };
    const StepBatch batch = batch_of(*planned.layers.front(), tokens);
    planned.step = plan(layers, next, {Planner::Use::kDecode, false, batch}, stream, reserve);
    // Rows may have moved to make room: more may be due by that.
    const size_t before = planned.due.size();
    planned.look(tokens);
    if (planned.due.size() == before) return;
  }
}

void Cache::Impl::take_planned_step(LayerRange range, int64_t tokens, const StepWork& work,
                                    Stream stream) {
  PlannedStep planned;
  for (int64_t l = range.first; l < range.first + range.count; ++l) {
    planned.layers.push_back(&cursor_.layer(l));
  }
  plan_step(planned, tokens, work, stream);
  planned.step.recorded = !work.launch;
  const auto append = [&] {
    if (!planned.counted.empty()) {
      backend_->word_updates()->add_token(planned.counted.data(), int64_t(planned.counted.size()),
                                          range.count, stream);
    }
    if (work.append) work.append(planned.views);
  };
  const auto launch = [&] {
    if (work.launch) work.launch(planned.views);
    if (!work.sets_lengths) return;
    std::vector<bool> in_full = cursor_.in_full();
    for (size_t n = 0; n < planned.due.size(); ++n) in_full[planned.due[n]] = planned.in_full(n);
    set_lengths(in_full, tokens, stream);
  };
  try {
    offload_beside(planned.step, stream);
    carry_out(planned.step, append, launch, stream);
  } catch (...) {
    forget(range);
    throw;
  }
  const Slots& slots = planned.slots();
  const bool counts = backend_->word_updates() != nullptr &&
                      backend_->capabilities().decode_appends && config_.local > 0;
  for (BatchLayer* layer : planned.layers) layer->count(tokens);
  const StepBatch batch = batch_of(*planned.layers.front(), 0);
  for (size_t l = 0; l < planned.layers.size(); ++l) {
    BatchLayer& at = *planned.layers[l];
    for (size_t n = 0; n < planned.due.size(); ++n) {
      const size_t i = planned.due[n];
      at.view(i) = planned.step.views[l * planned.due.size() + n];
      at.in_full[i] = planned.in_full(n, l);
      const int64_t steps = counts ? planner_.quiet_steps(*at.slots.layers[i], batch) : 0;
      at.quiet_until[i] = steps > 0 ? at.view(i).total + steps : -1;
    }
    at.look();
    stats_.searched_tokens += at.searched;
  }
  cursor_.changed();
  for (const Change& change : planned.step.changes) stats_.flushes += change.entering() > 0;
  stats_.decode_tokens += slots.size() * range.count;
}

void Cache::Impl::forget(LayerRange range) noexcept {
  for (int64_t l = range.first; l < range.first + range.count; ++l) {
    for (Layer* layer : cursor_.layer(l).slots.layers) {
      layer->tables.forget();
      ++layer->generation;
    }
  }
  cursor_.end();
}

void Cache::advance(const Batch& sequences, Stream stream) {
  const Impl::Lock lock(*impl_, Impl::Lock::Layers::kUntold);
  const Verb verb = impl_->verb("advance");
  const Config& config = impl_->config_;
  Backend& backend = *impl_->backend_;
  const LayerRange all{0, config.layers};
  impl_->open_step(verb, sequences, all);
  if (!backend.capabilities().graphs) {
    fail(
        "[advance] expected a cache on a GPU; on the CPU there are no graphs, and decode makes "
        "room by itself");
  }
  if (config.local == 0) {
    fail(
        "[advance] expected a config with a local window of 1 token or more, got local 0: a "
        "replayed token may not enter the zone as it arrives");
  }
  if (impl_->cursor_.left(all) < 1) {
    for (int64_t l = 0; l < config.layers; ++l) {
      const BatchLayer& at = impl_->cursor_.layer(l);
      for (const int64_t slot : at.slots.numbers) {
        verb.check_total(at.views[size_t(slot)].total + 1);
      }
    }
  }
  const Impl::Visit visit(*impl_, stream, Impl::Visit::Steps::kGoOn);
  Impl::StepWork work{impl_->decode_args(0), {}, {}};
  work.sets_lengths = impl_->page_tables_.has_value();
  impl_->take_step(all, 1, work, stream);
  backend.expect_replays(stream);
}

}  // namespace pariskv
