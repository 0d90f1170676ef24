// The walk: check the arguments, plan, apply, then one verb after the other.
#include <algorithm>

#include "cache_impl.h"

namespace pariskv {

Cache::Cache(Config config, Resources resources)
    : impl_(std::make_unique<Impl>(std::move(config), resources)) {}

Cache::~Cache() = default;

const Config& Cache::config() const { return impl_->config_; }

SequenceId Cache::add() {
  const Impl::Lock lock(impl_->mutex_);
  impl_->sequences_.emplace(impl_->next_id_, impl_->planner_.create(impl_->config_.layers));
  return impl_->next_id_++;
}

void Cache::remove(SequenceId sequence, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  impl_->find(impl_->verb("remove"), {sequence});
  const Impl::Visit visit(*impl_, stream);
  impl_->backend_->clear_scratch(stream);  // it may still hold rows of its last step
  impl_->sequences_.erase(sequence);
}

SequenceId Cache::fork(SequenceId sequence, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Sequence& source = *impl_->find(impl_->verb("fork"), {sequence})[0];
  const Impl::Visit visit(*impl_, stream);
  impl_->sequences_.emplace(impl_->next_id_, impl_->planner_.fork(source, stream));
  return impl_->next_id_++;
}

void Cache::reorder(const std::vector<SequenceId>& sequences, const std::vector<int64_t>& source,
                    Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
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
      next[i] = impl_->planner_.fork(*batch[from], stream);
      continue;
    }
    taken[from] = true;
    movers.push_back(i);
  }
  for (const size_t i : movers) next[i] = std::move(*batch[size_t(source[i])]);
  for (size_t i = 0; i < batch.size(); ++i) *batch[i] = std::move(next[i]);
}

void Cache::truncate(const std::vector<SequenceId>& sequences, const Cut& cut, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("truncate");
  const std::vector<Sequence*> batch = impl_->find(verb, sequences);
  const bool keeps = cut.counts == Cut::Counts::kKept;
  const char* argument = keeps ? "keep" : "drop";
  verb.check_batch_size(argument, int64_t(cut.tokens.size()), int64_t(batch.size()));
  struct Shorter {
    Layer* layer;
    Regions regions;
    Block state;  // the policy's; empty: the layer's own stays
  };
  std::vector<Shorter> next;
  for (size_t i = 0; i < batch.size(); ++i) {
    const int64_t tokens = cut.tokens[i];
    for (Layer& layer : batch[i]->layers) {
      const int64_t total = layer.regions.total();
      if (tokens < 0 || tokens > total) {
        fail("[truncate] ", argument, ": expected 0 to ", total, ", the tokens of sequence ",
             sequences[i], ", got ", tokens);
      }
      next.push_back(
          {&layer, layer.regions.truncated(keeps ? total - tokens : tokens, impl_->sizes_), {}});
    }
  }
  const Impl::Visit visit(*impl_, stream);
  // All that may fail first, on states beside the present ones.
  for (Shorter& shorter : next) {
    impl_->publish(*shorter.layer, stream);
    SequenceView view = impl_->view(*shorter.layer);
    const int64_t begin = std::max(shorter.regions.retrieval_end(impl_->sizes_), view.zone_begin);
    if (begin >= view.zone_end) continue;
    shorter.state = impl_->planner_.next_state(*shorter.layer, stream);
    if (shorter.state.data() != nullptr) view.state = shorter.state.data();
    impl_->policy_->on_recall({view, begin, view.zone_end}, stream);
  }
  for (Shorter& shorter : next) {
    Layer& layer = *shorter.layer;
    if (shorter.state.data() != nullptr) layer.state = std::move(shorter.state);
    layer.regions = shorter.regions;
    const int64_t unseen = layer.regions.total() - impl_->policy_->observed().begin;
    if (unseen < layer.observed) layer.observed = 0;  // their sum cannot be parted
    if (layer.regions.total() < layer.fetched_end) {  // other rows may come where fetched ones were
      ++layer.generation;
      layer.fetched_end = layer.regions.retrieval_end(impl_->sizes_);
    }
    layer.store.drop(impl_->shape_.segment_tokens, layer.regions.total(),
                     layer.regions.sink_end(impl_->sizes_),
                     layer.regions.retrieval_end(impl_->sizes_));
  }
}

void Cache::prefill(int64_t layer, const std::vector<SequenceId>& sequences,
                    const std::vector<int64_t>& lengths, const TensorView& k, const TensorView& v,
                    const PrefillOptions& options, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("prefill");
  const std::vector<Layer*> found = impl_->find_layers(verb, sequences, layer);
  const int64_t tokens = verb.check_lengths(lengths, int64_t(found.size()));
  const Config& config = impl_->config_;
  verb.check_tensor("k", k, config.dtype, {tokens, config.kv_heads, config.head_dim});
  verb.check_tensor("v", v, config.dtype, {tokens, config.kv_heads, config.value_dim});
  if (options.q) {
    verb.check_tensor("q", *options.q, config.dtype, {tokens, config.query_heads, config.head_dim});
  }

  std::vector<Layer*> layers;  // with a length above 0
  std::vector<Regions> next;
  std::vector<int64_t> begin, counts, first_row;
  int64_t row = 0;
  for (size_t i = 0; i < found.size(); row += lengths[i++]) {
    if (lengths[i] == 0) continue;
    first_row.push_back(row);
    layers.push_back(found[i]);
    next.push_back(found[i]->regions.prefilled(lengths[i], impl_->sizes_));
    verb.check_total(next.back().total());
    begin.push_back(found[i]->regions.total());
    counts.push_back(lengths[i]);
  }
  const Impl::Visit visit(*impl_, stream);
  impl_->limit_waiting_offloads(stream);
  Impl::Step step = impl_->plan(layers, next, Planner::Use::kStore, stream, options.q.has_value());
  step.offloads_at_once = true;
  const auto append = [&] {
    impl_->backend_->append({impl_->shape_, int64_t(layers.size()), step.views.data(), begin.data(),
                             counts.data(), k, v},
                            stream);
    if (options.q) impl_->observe(step, *options.q, first_row, stream);
  };
  impl_->carry_out(step, append, [] {}, stream);
}

void Cache::decode(int64_t layer, const std::vector<SequenceId>& sequences, const TensorView& q,
                   const TensorView& k, const TensorView& v, const TensorView& out,
                   const AttendOptions& options, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("decode");
  const std::vector<Layer*> layers = impl_->find_layers(verb, sequences, layer);
  const int64_t count = int64_t(layers.size());
  const Config& config = impl_->config_;
  verb.check_tensor("q", q, config.dtype, {count, config.query_heads, config.head_dim});
  verb.check_tensor("k", k, config.dtype, {count, config.kv_heads, config.head_dim});
  verb.check_tensor("v", v, config.dtype, {count, config.kv_heads, config.value_dim});
  verb.check_output("out", out, config.dtype, {count, config.query_heads, config.value_dim});
  Backend& backend = *impl_->backend_;
  Impl::Step step;
  DecodeArgs args = impl_->decode_args(layer);
  args.batch = count;
  args.q = q, args.k = k, args.v = v, args.out = out;
  args.logits = verb.check_options(options, count);
  args.lse = Verb::lse_of(options);

  if (backend.capturing(stream)) {  // a replay reads the lengths of its time
    for (const Layer* target : layers) step.views.push_back(impl_->view(*target));
    args.sequences = step.views.data();
    backend.decode(args, stream);
    return;
  }

  const Impl::Visit visit(*impl_, stream);
  std::vector<Regions> next;
  std::vector<int64_t> begin;
  const std::vector<int64_t> lengths(layers.size(), 1);
  for (const Layer* target : layers) {
    next.push_back(impl_->grown(*target));
    verb.check_total(next.back().total());
    begin.push_back(target->regions.total());
  }
  step = impl_->plan(layers, next, Planner::Use::kDecode, stream);
  impl_->offload_beside(step, stream);
  args.sequences = step.views.data();
  backend.reserve(args);

  // Without a local window the token itself may enter the zone: its row has to be there first.
  const bool append_first = !backend.capabilities().decode_appends || config.local == 0;
  const auto append = [&] {
    if (!append_first) return;
    backend.append({impl_->shape_, count, step.views.data(), begin.data(), lengths.data(), k, v},
                   stream);
  };
  impl_->carry_out(step, append, [&] { backend.decode(args, stream); }, stream);
  impl_->count_step(step);
}

void Cache::advance(const std::vector<SequenceId>& sequences, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("advance");
  const std::vector<Sequence*> batch = impl_->find(verb, sequences);
  const Config& config = impl_->config_;
  Backend& backend = *impl_->backend_;
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
  const Impl::Visit visit(*impl_, stream);
  std::vector<Layer*> layers;
  std::vector<Regions> next;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (Sequence* sequence : batch) {
      layers.push_back(&sequence->layers[size_t(layer)]);
      next.push_back(impl_->grown(*layers.back()));
      verb.check_total(next.back().total());
    }
  }
  Impl::Step step = impl_->plan(layers, next, Planner::Use::kDecode, stream);
  impl_->offload_beside(step, stream);
  DecodeArgs args = impl_->decode_args(0);
  args.batch = int64_t(batch.size());
  for (args.layer = 0; args.layer < config.layers; ++args.layer) {
    args.sequences = step.views.data() + args.layer * args.batch;
    backend.reserve(args);
  }
  impl_->carry_out(step, [] {}, [] {}, stream);
  backend.expect_replays(stream);
  impl_->count_step(step);
}

void Cache::attend(int64_t layer, const std::vector<SequenceId>& sequences,
                   const std::vector<int64_t>& lengths, const TensorView& q, const TensorView& out,
                   const AttendOptions& options, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("attend");
  const std::vector<Layer*> layers = impl_->find_layers(verb, sequences, layer);
  const int64_t tokens = verb.check_lengths(lengths, int64_t(layers.size()));
  const Config& config = impl_->config_;
  verb.check_tensor("q", q, config.dtype, {tokens, config.query_heads, config.head_dim});
  verb.check_output("out", out, config.dtype, {tokens, config.query_heads, config.value_dim});
  const Logits logits = verb.check_options(options, tokens);

  std::vector<SequenceView> views;
  for (size_t i = 0; i < layers.size(); ++i) {
    views.push_back(impl_->view(*layers[i]));
    if (lengths[i] > views[i].total) {
      fail("[attend] lengths: expected at most the ", views[i].total, " tokens of sequence ",
           sequences[i], " in layer ", layer, ", got ", lengths[i]);
    }
  }
  const Impl::Visit visit(*impl_, stream);
  for (Layer* target : layers) impl_->publish(*target, stream);
  impl_->backend_->attend_exact({impl_->shape_, int64_t(views.size()), views.data(), lengths.data(),
                                 q, logits, out, Verb::lse_of(options)},
                                stream);
}

void Cache::flush(const std::vector<SequenceId>& sequences, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  std::vector<Layer*> layers;
  std::vector<Regions> next;
  for (Sequence* sequence : impl_->find(impl_->verb("flush"), sequences)) {
    for (Layer& layer : sequence->layers) {
      layers.push_back(&layer);
      next.push_back(layer.regions.flushed(impl_->sizes_));
    }
  }
  const Impl::Visit visit(*impl_, stream);
  Impl::Step step = impl_->plan(layers, next, Planner::Use::kStore, stream);
  step.offloads_at_once = true;
  impl_->carry_out(step, [] {}, [] {}, stream);
}

void Cache::trim() {
  const Impl::Lock lock(impl_->mutex_);
  impl_->backend_->trim();
}

}  // namespace pariskv
