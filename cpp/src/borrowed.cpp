// Calls on borrowed rows: the other calls' walk, with addresses where these have tensors.
#include "cache_impl.h"

namespace pariskv {

void Cache::Impl::set_addresses(void* const* blocks, const Positions& positions,
                                const RowAddresses& rows, int64_t packed) const {
  for (int64_t p = positions.begin; p < positions.end; ++p, ++packed) {
    auto* block = static_cast<RowAddress*>(blocks[p / shape_.layout.tokens]);
    // Rows are never written: a pointer to const would make two types of row places.
    block[p % shape_.layout.tokens] = {
        static_cast<char*>(const_cast<void*>(rows.keys[size_t(packed)])),
        static_cast<char*>(const_cast<void*>(rows.values[size_t(packed)]))};
  }
}

void Cache::prefill_rows(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                         const RowAddresses& rows, const PrefillOptions& options, Stream stream) {
  impl_->prefill(layer, sequences, lengths, {{}, {}, &rows}, options, stream);
}

void Cache::decode_rows(int64_t layer, const Batch& sequences, const TensorView& q,
                        const RowAddresses& rows, const TensorView& out,
                        const AttendOptions& options, Stream stream) {
  impl_->decode(layer, sequences, {q, out, {{}, {}, &rows}}, true, options, stream);
}

void Cache::attend_rows(int64_t layer, const Batch& sequences, const std::vector<int64_t>& lengths,
                        const TensorView& q, const RowAddresses& rows, const TensorView& out,
                        const AttendOptions& options, Stream stream) {
  impl_->attend(layer, sequences, lengths, {q, out, {{}, {}, &rows}}, true, options, stream);
}

void Cache::move_rows(int64_t layer, const Batch& sequences, const std::vector<int64_t>& begin,
                      const std::vector<int64_t>& lengths, const RowAddresses& rows,
                      Stream stream) {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("move_rows");
  const std::vector<Layer*> layers = impl_->find_layers(verb, sequences, layer);
  verb.check_borrows(true);
  verb.check_batch_size("begin", int64_t(begin.size()), int64_t(layers.size()));
  verb.check_addresses(rows, verb.check_lengths(lengths, int64_t(layers.size())));
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t total = layers[i]->regions.total();
    if (begin[i] < 0 || begin[i] > total || lengths[i] > total - begin[i]) {
      fail("[move_rows] positions: expected a range within 0 to ", total, " of sequence ",
           sequences.ids()[i], ", got ", lengths[i], " positions from ", begin[i]);
    }
  }
  const Impl::Visit visit(*impl_, stream);
  // Blocks that forks share are copied first, all of them before the first address changes.
  std::vector<std::optional<LayerStore::Growth>> own;
  for (size_t i = 0; i < layers.size(); ++i) {
    own.push_back(
        impl_->planner_.plan_return(*layers[i], {begin[i], begin[i] + lengths[i]}, stream));
  }
  int64_t packed = 0;
  for (size_t i = 0; i < layers.size(); packed += lengths[i++]) {
    LayerStore& store = layers[i]->store;
    if (own[i]) store.grow(std::move(*own[i]));
    impl_->set_addresses(store.rows(), {begin[i], begin[i] + lengths[i]}, rows, packed);
  }
}

void Cache::rewrite_rows(int64_t layer, const Batch& sequences, Stream stream) {
  const Impl::Lock lock(*impl_);
  Impl& impl = *impl_;
  const Verb verb = impl.verb("rewrite_rows");
  const std::vector<Layer*> layers = impl.find_layers(verb, sequences, layer);
  verb.check_borrows(true);
  const Impl::Visit visit(impl, stream);
  struct Renewed {
    Layer* layer;
    LayerStore store;
    PartBlock state;  // null: the layer's own is changed
  };
  std::vector<Renewed> renewed;
  std::vector<Span> leaving, entering;
  for (Layer* target : layers) {
    SequenceView view = impl.view(*target);
    if (view.zone_tokens() == 0) continue;
    renewed.push_back({target, target->store, impl.planner_.next_state(*target, stream)});
    Renewed& next = renewed.back();
    // A copy shares all of its blocks, so those of the zone's summaries become its own here.
    next.store.grow(
        next.store.planned({impl.shape_.row_block_bytes(), impl.search_->needs().summary_bytes},
                           {0, 0, view.zone_begin, view.zone_end, view.zone_begin, view.zone_end},
                           *impl.backend_, stream));
    if (next.state) view[Part::kState] = next.state->as<char>();
    leaving.push_back({view, view.zone_begin, view.zone_end});
    view.summaries = next.store.summaries();
    entering.push_back({view, view.zone_begin, view.zone_end, target->marks.observed});
  }
  // Keys leave by their old summaries and enter by their new ones: the queries that a prompt
  // brought stay in the state.
  for (const Span& span : leaving) impl.search_->leave(span, stream);
  if (!entering.empty()) impl.search_->enter(entering, stream);
  for (size_t i = 0; i < renewed.size(); ++i) {
    Layer& own = *renewed[i].layer;
    own.store = std::move(renewed[i].store);
    if (renewed[i].state) own.parts[Part::kState] = std::move(renewed[i].state);
    impl.stats_.encoded_keys += (entering[i].end - entering[i].begin) * impl.config_.kv_heads;
  }
}

}  // namespace pariskv
