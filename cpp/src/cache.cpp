// The walk: check the arguments, plan, apply, then one verb after the other.
#include <algorithm>

#include "cache_impl.h"
#include "pariskv/codec.h"

namespace pariskv {

namespace {

Config checked(Config config) {
  config.validate();
  return config;
}

ModelShape shape_of(const Config& config) {
  return {config.kv_heads,       config.group(), config.head_dim, rotated_dim_of(config.head_dim),
          config.segment_tokens, config.dtype};
}

}  // namespace

Cache::Impl::Impl(Config config, Resources resources)
    : config_(checked(std::move(config))),
      shape_(shape_of(config_)),
      sizes_{config_.sink, config_.local, config_.update},
      arena_(resources.host ? resources.host : heap_resource(), config_.memory_budget),
      backend_(make_backend(config_)),
      policy_(make_policy(config_, shape_, *backend_)),
      planner_(shape_, sizes_, *policy_, *backend_, arena_) {}

std::vector<Sequence*> Cache::Impl::find(const Verb& verb, const std::vector<SequenceId>& ids) {
  std::vector<Sequence*> found;
  std::set<SequenceId> seen;
  for (const SequenceId id : ids) {
    const auto place = sequences_.find(id);
    if (place == sequences_.end()) {
      fail("[", verb.name, "] sequences: ", id,
           " is not a sequence of this cache (it was removed, or never added)");
    }
    if (!seen.insert(id).second) {
      fail("[", verb.name, "] sequences: expected each once, got ", id, " twice");
    }
    found.push_back(&place->second);
  }
  return found;
}

std::vector<Layer*> Cache::Impl::find_layers(const Verb& verb, const std::vector<SequenceId>& ids,
                                             int64_t layer) {
  verb.check_layer(layer);
  std::vector<Layer*> layers;
  for (Sequence* sequence : find(verb, ids)) layers.push_back(&sequence->layers[size_t(layer)]);
  return layers;
}

Cache::Impl::Running Cache::Impl::cut_running(Cutter& cutter, const Step& step) const {
  const int64_t tokens = int64_t(step.views.size());
  const int64_t queries = tokens * config_.query_heads;
  const int64_t lists = step.searched.empty() ? 0 : tokens * config_.kv_heads;
  Running running{};
  running.maximum = cutter.take<float>(queries);
  running.sum = cutter.take<float>(queries);
  running.weighted = cutter.take<float>(queries * config_.head_dim);
  running.selected = cutter.take<int32_t>(lists * policy_->width());
  running.selected_count = cutter.take<int64_t>(lists);
  return running;
}

Cache::Impl::Step Cache::Impl::prepare(std::vector<SequenceView> views) {
  Step step{};
  step.views = std::move(views);
  for (size_t i = 0; i < step.views.size(); ++i) {
    if (!step.views[i].searched) continue;
    step.searched.push_back(step.views[i]);
    step.rows.push_back(int64_t(i));
  }
  policy_->reserve(step.searched.data(), int64_t(step.searched.size()), arena_);
  Cutter measure(nullptr);
  cut_running(measure, step);
  workspace_.reserve(measure.bytes(), arena_);
  Cutter cutter(workspace_.data());
  step.running = cut_running(cutter, step);
  return step;
}

void Cache::Impl::refresh(Step& step, const std::vector<Layer*>& layers) const {
  for (size_t i = 0; i < layers.size(); ++i) step.views[i] = view(*layers[i]);
  for (size_t i = 0; i < step.rows.size(); ++i) {
    step.searched[i] = step.views[size_t(step.rows[i])];
  }
}

SelectCounts Cache::Impl::attend(const Step& step, const TensorView& q, const TensorView& out,
                                 const Logits& logits, const TensorView& lse, Stream stream) {
  const Running& running = step.running;
  const AttendArgs attend{shape_,
                          int64_t(step.views.size()),
                          step.views.data(),
                          q,
                          logits,
                          running.maximum,
                          running.sum,
                          running.weighted,
                          running.selected,
                          running.selected_count,
                          policy_->width(),
                          out,
                          lse};
  backend_->attend_resident(attend, stream);
  SelectCounts counts;
  if (!step.searched.empty()) {
    counts = policy_->select(
        {int64_t(step.searched.size()), step.searched.data(), step.rows.data(), q, logits,
         running.maximum, running.sum, running.selected, running.selected_count},
        stream);
  }
  backend_->attend_selected(attend, stream);
  return counts;
}

Cache::Cache(Config config, Resources resources)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(resources))) {}

Cache::~Cache() = default;

const Config& Cache::config() const { return impl_->config_; }

SequenceId Cache::add() {
  const Impl::Lock lock(impl_->mutex_);
  Sequence sequence;
  sequence.layers.resize(size_t(impl_->config_.layers));
  impl_->sequences_.emplace(impl_->next_id_, std::move(sequence));
  return impl_->next_id_++;
}

void Cache::remove(SequenceId sequence) {
  const Impl::Lock lock(impl_->mutex_);
  impl_->find(impl_->verb("remove"), {sequence});
  impl_->sequences_.erase(sequence);
  // Scratch may still hold what its last step looked at.
  impl_->workspace_.release();
  impl_->policy_->release();
}

SequenceId Cache::fork(SequenceId sequence) {
  const Impl::Lock lock(impl_->mutex_);
  const Sequence& source = *impl_->find(impl_->verb("fork"), {sequence})[0];
  Sequence copy;
  for (const Layer& layer : source.layers) copy.layers.push_back(impl_->planner_.fork(layer, {}));
  impl_->sequences_.emplace(impl_->next_id_, std::move(copy));
  return impl_->next_id_++;
}

void Cache::reorder(const std::vector<SequenceId>& sequences, const std::vector<int64_t>& source) {
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
  // The first taker of a source takes it itself, later ones a copy, made before anything moves.
  std::vector<Sequence> next(batch.size());
  std::vector<bool> taken(batch.size());
  std::vector<size_t> movers;
  for (size_t i = 0; i < batch.size(); ++i) {
    const size_t from = size_t(source[i]);
    if (!taken[from]) {
      taken[from] = true;
      movers.push_back(i);
      continue;
    }
    for (const Layer& layer : batch[from]->layers) {
      next[i].layers.push_back(impl_->planner_.fork(layer, {}));
    }
  }
  for (const size_t i : movers) next[i] = std::move(*batch[size_t(source[i])]);
  for (size_t i = 0; i < batch.size(); ++i) *batch[i] = std::move(next[i]);
}

void Cache::truncate(SequenceId sequence, int64_t tokens) {
  const Impl::Lock lock(impl_->mutex_);
  Sequence& found = *impl_->find(impl_->verb("truncate"), {sequence})[0];
  if (tokens < 0) fail("[truncate] tokens: expected 0 or more, got ", tokens);
  for (const Layer& layer : found.layers) {
    if (tokens > layer.regions.total()) {
      fail("[truncate] tokens: expected at most the sequence's ", layer.regions.total(), ", got ",
           tokens);
    }
  }
  for (Layer& layer : found.layers) {
    const Regions next = layer.regions.truncated(tokens, impl_->sizes_);
    const SequenceView view = impl_->view(layer);
    const int64_t begin = std::max(next.retrieval_end(impl_->sizes_), view.zone_begin);
    if (begin < view.zone_end) impl_->policy_->on_recall({view, begin, view.zone_end}, {});
    layer.regions = next;
    layer.store.drop(impl_->shape_.segment_tokens, layer.regions.total(),
                     layer.regions.sink_end(impl_->sizes_),
                     layer.regions.retrieval_end(impl_->sizes_));
  }
}

void Cache::prefill(int64_t layer, const std::vector<SequenceId>& sequences,
                    const std::vector<int64_t>& lengths, const TensorView& k, const TensorView& v,
                    Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("prefill");
  const std::vector<Layer*> layers = impl_->find_layers(verb, sequences, layer);
  const int64_t count = int64_t(layers.size());
  const int64_t tokens = verb.check_lengths(lengths, count);
  const Config& config = impl_->config_;
  verb.check_tensor("k", k, config.dtype, {tokens, config.kv_heads, config.head_dim});
  verb.check_tensor("v", v, config.dtype, {tokens, config.kv_heads, config.head_dim});

  std::vector<Change> changes;
  std::vector<SequenceView> views(layers.size());
  std::vector<int64_t> begin;
  for (size_t i = 0; i < layers.size(); ++i) {
    begin.push_back(layers[i]->regions.total());
    if (lengths[i] == 0) continue;
    const Regions next = layers[i]->regions.prefilled(lengths[i], impl_->sizes_);
    verb.check_total(next.total());
    changes.push_back(impl_->planner_.plan(*layers[i], next, stream));
  }

  const auto append = [&] {
    for (size_t i = 0; i < layers.size(); ++i) views[i] = impl_->view(*layers[i]);
    impl_->backend_->append(
        {impl_->shape_, count, views.data(), begin.data(), lengths.data(), k, v}, stream);
  };
  impl_->apply(changes, append, stream);
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
  verb.check_tensor("v", v, config.dtype, {count, config.kv_heads, config.head_dim});
  verb.check_output("out", out, config.dtype, {count, config.query_heads, config.head_dim});
  const Logits logits = verb.check_options(options, count);

  std::vector<Change> changes;
  std::vector<SequenceView> views;
  std::vector<int64_t> begin;
  const std::vector<int64_t> lengths(layers.size(), 1);
  int64_t flushes = 0;
  for (Layer* target : layers) {
    Regions next = target->regions.appended();
    verb.check_total(next.total());
    if (next.flush_due(impl_->sizes_)) next = next.flushed(impl_->sizes_);
    begin.push_back(target->regions.total());
    changes.push_back(impl_->planner_.plan(*target, next, stream));
    flushes += changes.back().spilled() > 0;
    views.push_back(sizes_of(next, impl_->sizes_, *impl_->policy_));
  }
  Impl::Step step = impl_->prepare(std::move(views));

  const auto append = [&] {
    impl_->refresh(step, layers);
    impl_->backend_->append(
        {impl_->shape_, count, step.views.data(), begin.data(), lengths.data(), k, v}, stream);
  };
  impl_->apply(changes, append, stream);
  const SelectCounts counts = impl_->attend(step, q, out, logits, Verb::lse_of(options), stream);

  impl_->stats_.flushes += flushes;
  impl_->stats_.decode_tokens += count;
  impl_->stats_.searched_tokens += int64_t(step.searched.size());
  impl_->stats_.candidates += counts.candidates;
  impl_->stats_.fetched_rows += counts.rows;
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
  verb.check_output("out", out, config.dtype, {tokens, config.query_heads, config.head_dim});
  const Logits logits = verb.check_options(options, tokens);

  std::vector<SequenceView> views;
  for (size_t i = 0; i < layers.size(); ++i) {
    views.push_back(impl_->view(*layers[i]));
    if (lengths[i] > views[i].total) {
      fail("[attend] lengths: expected at most the ", views[i].total, " tokens of sequence ",
           sequences[i], " in layer ", layer, ", got ", lengths[i]);
    }
  }
  impl_->backend_->attend_exact({impl_->shape_, int64_t(views.size()), views.data(), lengths.data(),
                                 q, logits, out, Verb::lse_of(options)},
                                stream);
}

void Cache::flush(const std::vector<SequenceId>& sequences, Stream stream) {
  const Impl::Lock lock(impl_->mutex_);
  std::vector<Change> changes;
  for (Sequence* sequence : impl_->find(impl_->verb("flush"), sequences)) {
    for (Layer& layer : sequence->layers) {
      changes.push_back(impl_->planner_.plan(layer, layer.regions.flushed(impl_->sizes_), stream));
    }
  }
  impl_->apply(changes, [] {}, stream);
}

}  // namespace pariskv
