// Shared by the calls of a cache: plans, and carrying them out.
#include "cache_impl.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace pariskv {

namespace {

Config checked(const Config& config) {
  config.validate();
  return config.resolved();
}

uint64_t next_number() {
  static std::atomic<uint64_t> next{0};
  return next++;
}

}  // namespace

Cache::Impl::Impl(Config config, const Resources& resources)
    : config_(checked(config)),
      backend_(make_backend(config_, resources)),
      search_(backend_->make_search(config_, shape_of(config_))),
      shape_(search_->shape()),
      sizes_{config_.sink, config_.local, config_.update, search_->needs().grain,
             search_->needs().opening},
      planner_(shape_, sizes_, *search_, *backend_,
               backend_->host_arena() != nullptr && config_.placement == Placement::kHost),
      tail_seeds_(search_->needs().tail_seed),
      cursor_(config_.layers),
      number_(next_number()),
      stop_(resources.should_stop) {}

Cache::Impl::Visit::Visit(Impl& impl, Stream stream, Steps steps)
    : backend_(*impl.backend_), stream_(stream) {
  if (steps == Steps::kEnd) impl.cursor_.end();
  backend_.enter(stream);
  try {
    impl.finish_offloads(0, stream);
    impl.keep_room(stream);
    impl.send_words(stream);  // of a failed call, while their targets are there
  } catch (...) {
    backend_.leave(stream);
    throw;
  }
}

std::vector<Sequence*> Cache::Impl::find(const Verb& verb, const Batch& batch, IdleSlots idle) {
  const Batch::Prepared* prepared = batch.prepared_.get();
  if (prepared != nullptr && prepared->cache != number_) {
    fail("[", verb.name, "] sequences: expected a batch of this cache, got one of another");
  }
  const auto& ids = batch.ids();
  const auto slot = std::find(ids.begin(), ids.end(), kIdle);
  if (slot != ids.end() && idle == IdleSlots::kRefused) {
    fail("[", verb.name, "] sequences: expected a sequence in each place, got an idle slot at ",
         slot - ids.begin(), "; decode and advance have these alone");
  }
  ++calls_;
  if (prepared != nullptr && !prepared->stale) {
    for (Sequence* sequence : prepared->sequences) {
      if (sequence != nullptr) sequence->used = calls_;
    }
    return prepared->sequences;
  }
  std::vector<Sequence*> found;
  std::set<SequenceId> seen;
  for (const SequenceId id : batch.ids()) {
    if (id == kIdle) {
      found.push_back(nullptr);
      continue;
    }
    const auto place = sequences_.find(id);
    if (place == sequences_.end()) {
      fail("[", verb.name, "] sequences: ", id,
           " is not a sequence of this cache (it was removed, or never added)",
           id < 0 ? "; a slot without a sequence is IDLE" : "");
    }
    if (!seen.insert(id).second) {
      fail("[", verb.name, "] sequences: expected each once, got ", id, " twice");
    }
    found.push_back(&place->second);
    found.back()->used = calls_;
  }
  return found;
}

std::vector<Layer*> Cache::Impl::find_layers(const Verb& verb, const Batch& batch, int64_t layer) {
  verb.check_layer(layer);
  std::vector<Layer*> layers;
  for (Sequence* sequence : find(verb, batch)) layers.push_back(&sequence->layers[size_t(layer)]);
  return layers;
}

Batch Cache::Impl::prepared(const Verb& verb, std::vector<SequenceId> ids) {
  Batch batch(std::move(ids));
  batch.prepared_ = std::make_shared<const Batch::Prepared>(
      Batch::Prepared{number_, find(verb, batch, IdleSlots::kAllowed)});
  const auto gone = [](const auto& other) { return other.expired(); };
  batches_.erase(std::remove_if(batches_.begin(), batches_.end(), gone), batches_.end());
  batches_.push_back(batch.prepared_);
  return batch;
}

void Cache::Impl::remove(SequenceId id) {
  const auto place = sequences_.find(id);
  for (const auto& weak : batches_) {
    const auto batch = weak.lock();
    if (!batch) continue;
    const auto& own = batch->sequences;
    if (std::find(own.begin(), own.end(), &place->second) != own.end()) batch->stale = true;
  }
  sequences_.erase(place);
}

Cache::Impl::Step Cache::Impl::plan(const std::vector<Layer*>& layers,
                                    const std::vector<Regions>& next,
                                    const Planner::Purpose& purpose, Stream stream,
                                    const Also& also) {
  return making_room(stream, [&] {
    Step step;
    for (size_t i = 0; i < layers.size(); ++i) {
      step.changes.push_back(planner_.plan(*layers[i], next[i], purpose, stream));
    }
    for (const Change& change : step.changes) step.views.push_back(change.view(sizes_, *search_));
    const std::vector<KeptChange> changes = choices(step);
    if (!changes.empty()) search_->reserve_choice(changes);
    if (also) also(step);
    return step;
  });
}

Cache::Impl::Arrivals Cache::Impl::arrivals_of(const std::vector<Layer*>& layers,
                                               const std::vector<int64_t>& lengths) {
  Arrivals arrivals;
  int64_t row = 0;
  for (size_t i = 0; i < layers.size(); row += lengths[i++]) {
    if (lengths[i] == 0) continue;
    arrivals.layers.push_back(layers[i]);
    arrivals.begin.push_back(layers[i]->regions.total());
    arrivals.counts.push_back(lengths[i]);
    arrivals.first_row.push_back(row);
  }
  return arrivals;
}

void Cache::Impl::check_new_rows(const Verb& verb, const NewRows& rows, int64_t tokens) const {
  verb.check_borrows(rows.borrowed != nullptr);
  if (rows.borrowed != nullptr) {
    verb.check_addresses(*rows.borrowed, tokens);
    return;
  }
  verb.check_tensor("k", rows.k, config_.dtype, {tokens, config_.kv_heads, config_.head_dim});
  verb.check_tensor("v", rows.v, config_.dtype, {tokens, config_.kv_heads, config_.value_dim});
}

void Cache::Impl::check_apart(const Verb& verb, const StepTensors& tensors, const TensorView& lse,
                              const TensorView& error) {
  const auto check_rows = [&](const char* name, const TensorView& numbers) {
    verb.check_apart(name, numbers, "k", tensors.rows.k);
    verb.check_apart(name, numbers, "v", tensors.rows.v);
    if (tensors.rows.borrowed != nullptr) verb.check_apart(name, numbers, *tensors.rows.borrowed);
  };
  verb.check_apart("out", tensors.out, "q", tensors.q, true);
  check_rows("out", tensors.out);
  for (const auto& [name, numbers] : {std::pair{"lse", lse}, std::pair{"error", error}}) {
    verb.check_apart(name, numbers, "out", tensors.out);
    verb.check_apart(name, numbers, "q", tensors.q);
    check_rows(name, numbers);
  }
  verb.check_apart("error", error, "lse", lse);
}

void Cache::Impl::append(const std::vector<SequenceView>& views, const std::vector<int64_t>& begin,
                         const std::vector<int64_t>& counts, const NewRows& rows, Stream stream) {
  if (rows.borrowed == nullptr) {
    backend_->append({shape_, int64_t(views.size()), views.data(), begin.data(), counts.data(),
                      rows.k, rows.v, rows.paged},
                     stream);
    return;
  }
  int64_t packed = 0;
  for (size_t i = 0; i < views.size(); packed += counts[i++]) {
    set_addresses(views[i].rows, {begin[i], begin[i] + counts[i]}, *rows.borrowed, packed);
  }
}

PageTables& Cache::Impl::page_tables(const Verb& verb, const char* argument) {
  if (!page_tables_) {
    fail("[", verb.name, "] ", argument, ": expected a cache that has a page table, got one ",
         "without; call page_table first");
  }
  return *page_tables_;
}

void Cache::Impl::note_unserved(const Step& step, const NewRows& rows) const {
  if (rows.unserved != nullptr) rows.unserved->clear();
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const Change& change = step.changes[i];
    // Rows that are narrow from now on are given back when the call ends.
    const bool stay =
        change.layer->near() && !any(change.work.narrowing) && !any(change.marks.dropped);
    if (page_tables_->serve(stay, step.views[i].total)) continue;
    rows.paged->rows[i] = ~rows.paged->rows[i];
    if (rows.unserved != nullptr) rows.unserved->push_back(int64_t(i));
  }
}

void Cache::Impl::observe(const Step& step, const TensorView& q,
                          const std::vector<int64_t>& first_row, Stream stream) {
  std::vector<QuerySpan> spans;
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const Change& change = step.changes[i];
    const QueryWindows& wanted = search_->needs().observed;
    int64_t number = change.layer->marks.observed;
    while (number < change.marks.observed) {
      const int64_t left = wanted.size - number % wanted.size, begin = wanted.at(number);
      const int64_t count = std::min(left, change.marks.observed - number);
      TensorView part = q;
      const int64_t row = first_row[i] + begin - change.layer->regions.total();
      part.data = static_cast<char*>(q.data) + row * q.strides[0] * size_of(q.dtype);
      part.shape[0] = count;
      spans.push_back({step.views[i], begin, begin + count, number, part});
      number += count;
    }
  }
  if (!spans.empty()) search_->observe(spans, stream);
}

void Cache::Impl::remember(const Step& step, const Queries& queries,
                           const std::vector<int64_t>& first_row, Stream stream) {
  if (shape_.recent == 0) return;
  std::vector<RememberJob> jobs;
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const int64_t begin = step.changes[i].layer->regions.total(), end = step.views[i].total;
    const int64_t count = std::min(end - begin, shape_.recent);
    TensorView part = queries.q;
    const int64_t row = first_row[i] + end - count - begin;
    part.data = static_cast<char*>(part.data) + row * part.strides[0] * size_of(part.dtype);
    part.shape[0] = count;
    jobs.push_back({step.views[i], end - count, part});
  }
  search_->remember({shape_, queries.logits, int64_t(jobs.size()), jobs.data()}, stream);
}

void Cache::Impl::enter(Step& step, Stream stream) {
  if (step.encoded) return;
  std::vector<Span> spans;
  std::vector<NarrowJob> jobs;
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const Change& change = step.changes[i];
    if (change.entering() > 0) {
      spans.push_back({step.views[i], change.work.entering.begin, change.work.entering.end,
                       change.marks.observed});
    }
    if (any(change.work.narrowing)) jobs.push_back({step.views[i], change.work.narrowing});
  }
  if (!spans.empty()) search_->enter(spans, stream);
  // What the search knows of these keys is taken off narrow rows.
  if (!jobs.empty()) backend_->narrow({shape_, int64_t(jobs.size()), jobs.data()}, stream);
}

std::vector<KeptChange> Cache::Impl::choices(const Step& step) const {
  std::vector<KeptChange> changes;
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const Change& change = step.changes[i];
    if (!change.work.chooses()) continue;
    changes.push_back({view(*change.layer), step.views[i], change.work.asked, change.work.whole});
  }
  return changes;
}

void Cache::Impl::choose(const Step& step, Stream stream) {
  const std::vector<KeptChange> changes = choices(step);
  if (!changes.empty()) search_->choose(changes, stream);
}

void Cache::Impl::copy_tail_rows(const Step& step, Stream stream) {
  std::vector<TailCopyJob> jobs;
  for (size_t i = 0; i < step.changes.size(); ++i) {
    const Change& change = step.changes[i];
    if (!change.work.tail_from) continue;
    jobs.push_back({step.views[i], change.marks.copied, *change.work.tail_from});
  }
  if (jobs.empty()) return;
  search_->copy_tail_rows({shape_, int64_t(jobs.size()), jobs.data()}, stream);
}

void Cache::Impl::publish(Layer& layer, Stream stream) {
  Block tables = layer.tables.grown(layer.store.row_blocks(), backend_->arena());
  layer.tables.publish(view(layer), layer.store.row_blocks(), layer.narrow.row_blocks(), {}, tables,
                       backend_->word_updates());
  send_words(stream);
}

DecodeArgs Cache::Impl::decode_args(int64_t layer) const {
  DecodeArgs args{};
  args.shape = shape_;
  args.layer = layer;
  return args;
}

}  // namespace pariskv
