// The walk: check the arguments, plan, apply, then one verb after the other.
#include "cache_impl.h"

namespace pariskv {

Cache::Cache(Config config, Resources resources)
    : impl_(std::make_unique<Impl>(std::move(config), resources)) {}

Cache::~Cache() = default;

const Config& Cache::config() const { return impl_->config_; }

SequenceId Cache::add() {
  const Impl::Lock lock(*impl_);
  const uint32_t tail_seed = impl_->tail_seeds_.next();
  const auto create = [&] { return impl_->planner_.create(impl_->config_.layers, tail_seed); };
  try {
    impl_->sequences_.emplace(impl_->next_id_, create());
  } catch (const OutOfMemory&) {  // of a device that is full of rows
    const Impl::Visit visit(*impl_, {});
    impl_->sequences_.emplace(impl_->next_id_, impl_->making_room({}, create));
  }
  return impl_->next_id_++;
}

Batch Cache::batch(std::vector<SequenceId> sequences) const {
  const Impl::Lock lock(*impl_);
  return impl_->prepared(impl_->verb("batch"), std::move(sequences));
}

void Cache::remove(SequenceId sequence, Stream stream) {
  const Impl::Lock lock(*impl_);
  impl_->find(impl_->verb("remove"), {sequence});
  const Impl::Visit visit(*impl_, stream);
  impl_->backend_->clear_scratch(stream);  // both may still hold rows of its last step
  impl_->search_->clear_scratch(stream);
  impl_->remove(sequence);
}

SequenceId Cache::fork(SequenceId sequence, Stream stream) {
  const Impl::Lock lock(*impl_);
  const Sequence& source = *impl_->find(impl_->verb("fork"), {sequence})[0];
  const Impl::Visit visit(*impl_, stream);
  impl_->sequences_.emplace(impl_->next_id_, impl_->making_room(stream, [&] {
    return impl_->planner_.fork(source, stream);
  }));
  return impl_->next_id_++;
}

void Cache::reorder(const Batch& sequences, const std::vector<int64_t>& source, Stream stream) {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("reorder");
  const std::vector<Sequence*> batch = impl_->find(verb, sequences);
  const int64_t count = int64_t(batch.size());
  verb.check_batch_size("source", int64_t(source.size()), count);
  for (const int64_t from : source) {
    if (from < 0 || from >= count) {
      fail("[reorder] source: expected indices 0 to ", count - 1, ", got ", from);
    }
  }
  const Impl::Visit visit(*impl_, stream);
  // The first taker of a source takes it itself, later ones a copy, made before anything moves.
  std::vector<Sequence> next(batch.size());
  std::vector<bool> taken(batch.size());
  std::vector<size_t> movers;
  for (size_t i = 0; i < batch.size(); ++i) {
    const size_t from = size_t(source[i]);
    if (taken[from]) {
      next[i] =
          impl_->making_room(stream, [&] { return impl_->planner_.fork(*batch[from], stream); });
      continue;
    }
    taken[from] = true;
    movers.push_back(i);
  }
  for (const size_t i : movers) next[i] = std::move(*batch[size_t(source[i])]);
  for (size_t i = 0; i < batch.size(); ++i) *batch[i] = std::move(next[i]);
}

void Cache::prefill(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                    const TensorView& k, const TensorView& v, const PrefillOptions& options,
                    Stream stream) {
  impl_->prefill(layer, sequences, lengths, {k, v}, options, stream);
}

void Cache::Impl::prefill(int64_t layer, const Batch& sequences,
                          const std::vector<int64_t>& lengths, const NewRows& rows,
                          const PrefillOptions& options, Stream stream) {
  const Lock lock(*this);
  const Verb verb = this->verb(rows.borrowed == nullptr ? "prefill" : "prefill_rows");
  const std::vector<Layer*> found = find_layers(verb, sequences, layer);
  const int64_t tokens = verb.check_lengths(lengths, int64_t(found.size()));
  check_new_rows(verb, rows, tokens);
  if (options.q) {
    verb.check_tensor("q", *options.q, config_.dtype,
                      {tokens, config_.query_heads, config_.head_dim});
  }

  const Logits logits =
      verb.check_options({options.scale, options.softcap, {}, {}, {}, {}, {}, {}}, tokens);

  const Arrivals arrivals = arrivals_of(found, lengths);
  std::vector<Regions> next;
  for (size_t i = 0; i < arrivals.layers.size(); ++i) {
    next.push_back(arrivals.layers[i]->regions.prefilled(arrivals.counts[i], sizes_));
    verb.check_total(next.back().total());
  }
  for (size_t i = 0; i < found.size() && !options.q; ++i) {
    if (lengths[i] == 0) continue;
    verb.check_complete(sequences.ids()[i], found[i]->marks.dropped,
                        "q: expected the queries of these tokens, to choose rows by");
  }
  NewRows own = rows;
  std::optional<PagedRows> paged;
  if (!options.page_rows.empty()) {
    verb.check_paged(lengths);
    paged = page_tables(verb, "page_rows").rows(verb, options.page_rows, int64_t(found.size()));
    own.paged = &*paged, own.unserved = options.unserved;
  }
  const Visit visit(*this, stream);
  const Queries queries{options.q ? *options.q : TensorView{}, logits};
  store(arrivals, next, own, options.q ? &queries : nullptr, [](const auto&) {}, stream);
}

void Cache::decode(int64_t layer, const Batch& sequences, const TensorView& q, const TensorView& k,
                   const TensorView& v, const TensorView& out, const AttendOptions& options,
                   Stream stream) {
  impl_->decode(layer, sequences, {q, out, {k, v}}, true, options, stream);
}

void Cache::decode(int64_t layer, const Batch& sequences, const TensorView& q,
                   const TensorView& out, const AttendOptions& options, Stream stream) {
  impl_->decode(layer, sequences, {q, out, {}}, false, options, stream);
}

void Cache::attend(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                   const TensorView& q, const TensorView& out, const AttendOptions& options,
                   Stream stream) {
  impl_->attend(layer, sequences, lengths, {q, out, {}}, false, options, stream);
}

void Cache::attend(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                   const TensorView& q, const TensorView& k, const TensorView& v,
                   const TensorView& out, const AttendOptions& options, Stream stream) {
  impl_->attend(layer, sequences, lengths, {q, out, {k, v}}, true, options, stream);
}

void Cache::Impl::attend(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                         const StepTensors& tensors, bool appends, const AttendOptions& options,
                         Stream stream) {
  const Lock lock(*this);
  const Verb verb = this->verb(tensors.rows.borrowed == nullptr ? "attend" : "attend_rows");
  const std::vector<Layer*> found = find_layers(verb, sequences, layer);
  const int64_t tokens = verb.check_lengths(lengths, int64_t(found.size()));
  verb.check_tensor("q", tensors.q, config_.dtype, {tokens, config_.query_heads, config_.head_dim});
  if (appends) check_new_rows(verb, tensors.rows, tokens);
  verb.check_output("out", tensors.out, config_.dtype,
                    {tokens, config_.query_heads, config_.value_dim});
  AttendExactArgs args{};
  args.shape = shape_;
  args.q = tensors.q, args.out = tensors.out;
  args.logits = verb.check_options(options, tokens);
  args.precision = options.precision;
  verb.refuse_decodes_own(options);
  args.lse = Verb::lse_of(options);
  check_apart(verb, tensors, args.lse, {});
  for (size_t i = 0; i < found.size(); ++i) {
    if (lengths[i] == 0) continue;
    verb.check_complete(sequences.ids()[i], found[i]->marks.dropped,
                        "sequences: expected all of their rows (decode takes a turn token by "
                        "token)");
  }
  const auto attend_over = [&](const std::vector<SequenceView>& views,
                               const std::vector<int64_t>& counts,
                               const std::vector<std::vector<int64_t>>& hosted) {
    args.batch = int64_t(views.size());
    args.sequences = views.data();
    args.lengths = counts.data();
    args.hosted = hosted.data();
    backend_->attend_exact(args, stream);
  };

  if (appends) {
    const Arrivals arrivals = arrivals_of(found, lengths);
    std::vector<Regions> next;
    for (size_t i = 0; i < arrivals.layers.size(); ++i) {
      verb.check_total(arrivals.begin[i] + arrivals.counts[i]);
      next.push_back(arrivals.layers[i]->regions.grown(arrivals.counts[i], sizes_));
    }
    const Visit visit(*this, stream);
    const auto attend = [&](const Step& step) {
      std::vector<std::vector<int64_t>> hosted;
      std::vector<SequenceView> views = step.views;
      for (size_t i = 0; i < views.size(); ++i) {
        const Change& change = step.changes[i];
        hosted.push_back(change.hosted());
        // Rows that enter the zone by this call are still there as they came.
        views[i].zone_begin = change.layer->regions.sink_end(sizes_);
        views[i].zone_end = change.layer->regions.retrieval_end(sizes_);
      }
      attend_over(views, arrivals.counts, hosted);
    };
    const Queries queries{tensors.q, args.logits};
    return making_room(stream,
                       [&] { store(arrivals, next, tensors.rows, &queries, attend, stream); });
  }
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t total = found[i]->regions.total();
    if (lengths[i] <= total) continue;
    fail("[attend] lengths: expected at most the ", total, " tokens of sequence ",
         sequences.ids()[i], " in layer ", layer, ", got ", lengths[i]);
  }
  const Visit visit(*this, stream);
  making_room(stream, [&] {
    std::vector<SequenceView> views;
    std::vector<std::vector<int64_t>> hosted;
    for (Layer* target : found) {
      views.push_back(view(*target));
      hosted.push_back(target->store.hosted());
      publish(*target, stream);
    }
    attend_over(views, lengths, hosted);
  });
}

void Cache::flush(const Batch& sequences, Stream stream) {
  const Impl::Lock lock(*impl_);
  impl_->flush(impl_->find(impl_->verb("flush"), sequences), stream);
}

void Cache::flush_all(Stream stream) {
  const Impl::Lock lock(*impl_);
  std::vector<Sequence*> all;
  for (auto& [id, sequence] : impl_->sequences_) {
    all.push_back(&sequence);
  }
  impl_->flush(all, stream);
}

void Cache::Impl::flush(const std::vector<Sequence*>& sequences, Stream stream) {
  std::vector<Layer*> layers;
  std::vector<Regions> next;
  for (Sequence* sequence : sequences) {
    for (Layer& layer : sequence->layers) {
      layers.push_back(&layer);
      next.push_back(layer.regions.flushed(sizes_));
    }
  }
  const Visit visit(*this, stream);
  Step step = plan(layers, next, Planner::Purpose{}, stream);
  step.offloads_at_once = true;
  carry_out(step, [] {}, [] {}, stream);
}

Pages Cache::pages() const {
  const Impl::Lock lock(*impl_);
  const PageRange range = impl_->backend_->pages();
  if (range.data == nullptr) PageTables::refuse(impl_->verb("pages"));
  const Config& config = impl_->config_;
  const ModelShape& shape = impl_->shape_;
  const int64_t row = config.head_dim + config.value_dim, size = size_of(config.dtype);
  Pages pages{{}, config.head_dim};
  pages.rows.data = range.data, pages.rows.dtype = config.dtype;
  pages.rows.device = config.device, pages.rows.rank = 4;
  pages.rows.shape = {range.count, config.kv_heads, shape.segment_tokens, row};
  pages.rows.strides = {range.page_bytes / size, shape.segment_tokens * row, row, 1};
  return pages;
}

PageTable Cache::page_table(int64_t sequences, int64_t tokens, Stream stream) {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("page_table");
  PageTables tables(verb, *impl_->backend_, impl_->shape_);
  const Impl::Visit visit(*impl_, stream);
  const PageTable made =
      impl_->making_room(stream, [&] { return tables.make(verb, sequences, tokens, stream); });
  impl_->page_tables_ = std::move(tables);
  return made;
}

void Cache::trim() {
  const Impl::Lock lock(*impl_);
  impl_->backend_->trim();
}

}  // namespace pariskv
