// Calls that look at a cache and leave it as it is.
#include <algorithm>
#include <limits>

#include "cache_impl.h"

namespace pariskv {

Explanation Cache::explain(int64_t layer, SequenceId sequence, const TensorView& q,
                           const AttendOptions& options, Stream stream) const {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("explain");
  const std::vector<Layer*> layers = impl_->find_layers(verb, {sequence}, layer);
  const Config& config = impl_->config_;
  verb.check_tensor("q", q, config.dtype, {config.query_heads, config.head_dim});
  const Logits logits = verb.check_options(options, 1);
  verb.refuse_decodes_own(options);
  verb.refuse_fast(options);

  Explanation explanation;
  explanation.kv_heads = config.kv_heads;
  explanation.query_heads = config.query_heads;
  // The mode of a step of this sequence alone.
  const SequenceView view = layers[0]->view(impl_->sizes_, *impl_->search_, config.kv_heads);
  explanation.zone_begin = view.zone_begin;
  explanation.zone_tokens = view.zone_tokens();
  if (view.dense()) return explanation;

  TensorView one = q;  // the same queries as a batch of one
  one.rank = 3;
  one.shape = {1, q.shape[0], q.shape[1]};
  one.strides = {0, q.strides[0], q.strides[1]};
  const Impl::Visit visit(*impl_, stream);
  impl_->publish(*layers[0], stream);
  DecodeArgs args = impl_->decode_args(layer);
  args.batch = 1;
  args.sequences = &view;
  args.q = one;
  args.logits = logits;
  args.traced = true;
  impl_->making_room(stream, [&] { impl_->search_->reserve(args); });
  // Both take memory of the device for their results, and rows can make room for it.
  impl_->making_room(stream, [&] {
    impl_->send_words(stream);
    impl_->search_->explain(args, stream, explanation);
  });
  explanation.exact.assign(size_t(explanation.query_heads * explanation.selected),
                           std::numeric_limits<float>::quiet_NaN());
  std::vector<int32_t> positions(explanation.positions.begin(), explanation.positions.end());
  impl_->making_room(stream, [&] {
    impl_->send_words(stream);
    impl_->backend_->exact_logits({impl_->shape_, view, one, logits, positions.data(),
                                   explanation.selected, explanation.exact.data()},
                                  stream);
  });
  return explanation;
}

Summaries Cache::summaries(int64_t layer, SequenceId sequence) const {
  const Impl::Lock lock(*impl_);
  const std::vector<Layer*> layers =
      impl_->find_layers(impl_->verb("summaries"), {sequence}, layer);
  return impl_->search_->summaries(impl_->view(*layers[0]));
}

void Cache::read(int64_t layer, SequenceId sequence, int64_t begin, const TensorView& k,
                 const TensorView& v, Stream stream) const {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("read");
  const std::vector<Layer*> layers = impl_->find_layers(verb, {sequence}, layer);
  const Config& config = impl_->config_;
  const int64_t tokens = k.rank > 0 ? k.shape[0] : 0;
  verb.check_output("k", k, config.dtype, {tokens, config.kv_heads, config.head_dim});
  verb.check_output("v", v, config.dtype, {tokens, config.kv_heads, config.value_dim});
  verb.check_apart("k", k, "v", v);
  const SequenceView view = impl_->view(*layers[0]);
  if (begin < 0 || begin > view.total || tokens > view.total - begin) {
    fail("[read] positions: expected a range within 0 to ", view.total, ", got ", tokens,
         " positions from ", begin);
  }
  if (tokens == 0) return;
  verb.check_stored(sequence, layers[0]->marks.dropped, {begin, begin + tokens});
  const Impl::Visit visit(*impl_, stream);
  impl_->publish(*layers[0], stream);
  impl_->backend_->read({impl_->shape_, 1, &view, &begin, &tokens, k, v}, stream);
}

int64_t Cache::length(SequenceId sequence, int64_t layer) const {
  const Impl::Lock lock(*impl_);
  return impl_->find_layers(impl_->verb("length"), {sequence}, layer)[0]->regions.total();
}

RegionCounts Cache::regions(SequenceId sequence, int64_t layer) const {
  const Impl::Lock lock(*impl_);
  const Layer& found = *impl_->find_layers(impl_->verb("regions"), {sequence}, layer)[0];
  RegionCounts counts = found.regions.counts(impl_->sizes_);
  counts.dropped = found.marks.dropped.end - found.marks.dropped.begin;
  return counts;
}

std::vector<SequenceId> Cache::sequences() const {
  const Impl::Lock lock(*impl_);
  std::vector<SequenceId> ids;
  for (const auto& [id, sequence] : impl_->sequences_) ids.push_back(id);
  return ids;
}

Stats Cache::stats(StatsScope scope) const {
  const Impl::Lock lock(*impl_);
  Stats stats = impl_->stats_;
  Backend& backend = *impl_->backend_;
  stats.memory = backend.arena().use();
  stats.row_bytes = backend.arena().held(Holds::kRows);
  stats.summary_bytes = backend.arena().held(Holds::kSummaries);
  stats.kept_bytes = backend.arena().held(Holds::kKept);
  if (backend.host_arena() != nullptr) {
    stats.host_memory = backend.host_arena()->use();
    stats.offloaded_bytes = backend.host_arena()->held(Holds::kRows);
    stats.row_bytes += stats.offloaded_bytes;
  }
  stats.sequences = int64_t(impl_->sequences_.size());
  stats.workspace_bytes = backend.scratch_bytes() + impl_->search_->scratch_bytes();
  const DecodeCounts counts = impl_->search_->counts();
  stats.candidates = counts.candidates;
  stats.fetched_rows = counts.rows;
  stats.cached_rows = counts.cached_rows;
  if (counts.weighed > 0) {
    const double one = double(DecodeCounts::kOne);
    stats.mean_error = double(counts.error) / one / double(counts.weighed);
    stats.worst_error = double(counts.worst) / one;
    stats.mean_mass = double(counts.mass) / one / double(counts.weighed);
    stats.least_mass = 1 - double(counts.most_missed) / one;
  }
  if (scope == StatsScope::kCounted) return stats;

  const int64_t heads = impl_->config_.kv_heads;
  const auto kept_rows_of = [&](const Layer& layer) {
    if (layer.parts[Part::kTailCopies]) return heads * layer.marks.copied.count;
    if (!layer.parts[Part::kKept]) return int64_t{0};
    const SequenceView view = impl_->view(layer);
    std::vector<int32_t> rows(size_t(2 * heads));  // attended and held, by turns
    backend.fetch(rows.data(), view[Part::kKept], int64_t(rows.size() * sizeof(int32_t)));
    int64_t attended = 0;
    for (int64_t head = 0; head < heads; ++head) attended += rows[size_t(2 * head)];
    return attended;
  };
  for (auto& [id, sequence] : impl_->sequences_) {
    for (const Layer& layer : sequence.layers) {
      stats.tokens += layer.regions.total();
      stats.kept_rows += kept_rows_of(layer);
      stats.dropped_rows += (layer.marks.dropped.end - layer.marks.dropped.begin) * heads;
      stats.unusable_keys += impl_->search_->unusable_keys(impl_->view(layer));
    }
  }
  return stats;
}

}  // namespace pariskv
