// Calls that look at a cache and leave it as it is.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cache_impl.h"
#include "codec/summary_layout.h"

namespace pariskv {

namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/** Copies what a selection went through out of the workspace. */
void fill(Explanation& out, const SearchItem& item, int64_t top_k) {
  const int64_t heads = out.kv_heads;
  out.searched = true;
  out.coarse.assign(item.scores, item.scores + heads * out.zone_tokens);
  out.candidates = *std::max_element(item.candidate_count, item.candidate_count + heads);
  out.selected = *std::max_element(item.selected_count, item.selected_count + heads);
  out.candidate_positions.assign(size_t(heads * out.candidates), -1);
  out.positions.assign(size_t(heads * out.selected), -1);
  out.worth.assign(size_t(heads * out.selected), kNone);
  out.estimated.assign(size_t(out.query_heads * out.selected), kNone);
  out.exact.assign(size_t(out.query_heads * out.selected), kNone);
  for (int64_t head = 0; head < heads; ++head) {
    const int32_t* candidate = item.candidate + head * (item.candidates + kCollectSlack);
    for (int64_t i = 0; i < item.candidate_count[head]; ++i) {
      out.candidate_positions[size_t(head * out.candidates + i)] = out.zone_begin + candidate[i];
    }
    for (int64_t i = 0; i < item.selected_count[head]; ++i) {
      out.positions[size_t(head * out.selected + i)] = item.selected[head * top_k + i];
      out.worth[size_t(head * out.selected + i)] = item.selected_worth[head * top_k + i];
    }
  }
}

/** Estimated logits of the selected rows; one searcher speaks for all heads under mean_query. */
void fill_estimates(Explanation& out, const SearchItem& item, int64_t searchers, int64_t top_k) {
  const int64_t group = out.query_heads / out.kv_heads;
  for (int64_t query = 0; query < out.query_heads; ++query) {
    const int64_t head = query / group;
    const int64_t searcher = searchers == 1 ? head : query;
    for (int64_t i = 0; i < item.selected_count[head]; ++i) {
      const int64_t candidate = item.selected_candidate[head * top_k + i];
      out.estimated[size_t(query * out.selected + i)] =
          item.estimates[searcher * item.candidates + candidate];
    }
  }
}

}  // namespace

Explanation Cache::explain(int64_t layer, SequenceId sequence, const TensorView& q,
                           const AttendOptions& options) const {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("explain");
  const std::vector<Layer*> layers = impl_->find_layers(verb, {sequence}, layer);
  const Config& config = impl_->config_;
  verb.check_tensor("q", q, config.dtype, {config.query_heads, config.head_dim});
  const Logits logits = verb.check_options(options, 1);

  Explanation explanation;
  explanation.kv_heads = config.kv_heads;
  explanation.query_heads = config.query_heads;
  const SequenceView view = impl_->view(*layers[0]);
  explanation.zone_begin = view.zone_begin;
  explanation.zone_tokens = view.zone_tokens();
  if (!view.searched) return explanation;

  TensorView one = q;  // the same queries as a batch of one
  one.rank = 3;
  one.shape = {1, q.shape[0], q.shape[1]};
  one.strides = {0, q.strides[0], q.strides[1]};
  std::vector<char> discarded(size_t(one.size() * size_of(config.dtype)));
  const TensorView out = TensorView::contiguous(discarded.data(), config.dtype,
                                                {1, config.query_heads, config.head_dim});
  const Impl::Step step = impl_->prepare({view});
  const SelectTrace& trace = *impl_->attend(step, one, out, logits, {}, {});
  const SearchItem& item = trace.items[0];
  fill(explanation, item, config.top_k);
  fill_estimates(explanation, item, trace.searchers, config.top_k);

  std::vector<int32_t> positions(size_t(config.kv_heads * config.top_k));
  std::copy_n(item.selected, positions.size(), positions.begin());
  std::vector<float> exact(size_t(config.query_heads * config.top_k), kNone);
  impl_->backend_->exact_logits({impl_->shape_, view, one, logits, positions.data(),
                                 item.selected_count, config.top_k, exact.data()},
                                {});
  for (int64_t query = 0; query < config.query_heads; ++query) {
    std::copy_n(exact.begin() + query * config.top_k, explanation.selected,
                explanation.exact.begin() + query * explanation.selected);
  }
  return explanation;
}

Summaries Cache::summaries(int64_t layer, SequenceId sequence) const {
  const Impl::Lock lock(impl_->mutex_);
  const std::vector<Layer*> layers =
      impl_->find_layers(impl_->verb("summaries"), {sequence}, layer);
  const SequenceView view = impl_->view(*layers[0]);
  const SummaryLayout layout = impl_->shape_.summary();

  Summaries out;
  out.kv_heads = layout.kv_heads;
  out.tokens = view.zone_tokens();
  out.zone_begin = view.zone_begin;
  out.rotated_dim = layout.rotated_dim;
  out.subspaces = layout.subspaces();
  for (int64_t head = 0; head < out.kv_heads; ++head) {
    for (int64_t position = view.zone_begin; position < view.zone_end; ++position) {
      uint8_t* block = view.summaries[position / layout.tokens];
      const int64_t slot = position % layout.tokens;
      const uint8_t* signs = layout.signs(block, head, slot);
      const uint8_t* record = layout.records(block, head, slot);
      const uint8_t norm = *layout.norms(block, head, slot);
      const float scale =
          float_of_bits(uint32_t{*layout.scales(block, head, slot)} << kScaleShift) / 255.0f;
      out.signs.insert(out.signs.end(), signs, signs + out.subspaces);
      for (int64_t d = 0; d < out.rotated_dim; ++d) {
        uint8_t level = 0;
        for (int plane = 0; plane < 3; ++plane) {
          level |= uint8_t((record[plane * layout.plane_bytes() + d / 8] >> (d % 8) & 1) << plane);
        }
        out.magnitudes.push_back(level);
      }
      for (int64_t b = 0; b < out.subspaces; ++b) {
        out.weights.push_back(scale * float(record[layout.weights_offset() + b]));
      }
      out.norms.push_back(float(double(norm_units(norm)) * kNormUnit));
    }
  }
  return out;
}

void Cache::read(int64_t layer, SequenceId sequence, int64_t begin, const TensorView& k,
                 const TensorView& v, Stream stream) const {
  const Impl::Lock lock(impl_->mutex_);
  const Verb verb = impl_->verb("read");
  const std::vector<Layer*> layers = impl_->find_layers(verb, {sequence}, layer);
  const Config& config = impl_->config_;
  const int64_t tokens = k.rank > 0 ? k.shape[0] : 0;
  verb.check_tensor("k", k, config.dtype, {tokens, config.kv_heads, config.head_dim});
  verb.check_tensor("v", v, config.dtype, {tokens, config.kv_heads, config.head_dim});
  const SequenceView view = impl_->view(*layers[0]);
  if (begin < 0 || begin > view.total || tokens > view.total - begin) {
    fail("[read] positions: expected a range within 0 to ", view.total, ", got ", begin, " to ",
         begin + tokens);
  }
  impl_->backend_->read({impl_->shape_, 1, &view, &begin, &tokens, k, v}, stream);
}

int64_t Cache::length(SequenceId sequence, int64_t layer) const {
  const Impl::Lock lock(impl_->mutex_);
  return impl_->find_layers(impl_->verb("length"), {sequence}, layer)[0]->regions.total();
}

RegionCounts Cache::regions(SequenceId sequence, int64_t layer) const {
  const Impl::Lock lock(impl_->mutex_);
  return impl_->find_layers(impl_->verb("regions"), {sequence}, layer)[0]->regions.counts(
      impl_->sizes_);
}

std::vector<SequenceId> Cache::sequences() const {
  const Impl::Lock lock(impl_->mutex_);
  std::vector<SequenceId> ids;
  for (const auto& [id, sequence] : impl_->sequences_) ids.push_back(id);
  return ids;
}

Stats Cache::stats() const {
  const Impl::Lock lock(impl_->mutex_);
  Stats stats = impl_->stats_;
  stats.memory = impl_->arena_.use();
  stats.sequences = int64_t(impl_->sequences_.size());
  stats.workspace_bytes = impl_->workspace_.bytes() + impl_->policy_.workspace_bytes();
  std::set<const Block*> seen;  // forks share blocks
  const auto bytes_once = [&](const Block& block) {
    return seen.insert(&block).second ? block.bytes() : 0;
  };
  for (const auto& [id, sequence] : impl_->sequences_) {
    for (const Layer& layer : sequence.layers) {
      stats.tokens += layer.regions.total();
      layer.store.each_row_block([&](const Block& block) { stats.row_bytes += bytes_once(block); });
      layer.store.each_summary_block(
          [&](const Block& block) { stats.summary_bytes += bytes_once(block); });
      stats.summary_bytes += layer.state.bytes();
      if (layer.state.data() == nullptr) continue;
      const KeyStatistics statistics = impl_->policy_.statistics(layer.state.data());
      const int64_t zone = layer.regions.zone_tokens(impl_->sizes_);
      for (int64_t head = 0; head < impl_->config_.kv_heads; ++head) {
        stats.unusable_keys += zone - statistics.usable[head];
      }
    }
  }
  return stats;
}

}  // namespace pariskv
