// A token more of a recorded step: what its replay will find in the device's tables.
#include <algorithm>

#include "cache_impl.h"

namespace pariskv {

void Cache::advance(const Batch& sequences, Stream stream) {
  const Impl::Lock lock(*impl_);
  const Verb verb = impl_->verb("advance");
  const std::vector<Sequence*> slots =
      impl_->find_unsettled(verb, sequences, Impl::IdleSlots::kAllowed);
  std::vector<Sequence*> batch;
  for (Sequence* sequence : slots) {
    if (sequence != nullptr) batch.push_back(sequence);
  }
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
  if (impl_->advance_quietly(sequences, batch, stream)) {
    backend.expect_replays(stream);
    return;
  }
  for (Sequence* sequence : batch) sequence->settle();
  impl_->reserved_for_.reset();
  std::vector<Layer*> layers;
  std::vector<Regions> next;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (Sequence* sequence : batch) {
      layers.push_back(&sequence->layers[size_t(layer)]);
      next.push_back(layers.back()->regions.grown(1, impl_->sizes_));
      verb.check_total(next.back().total());
    }
  }
  const auto reserve = [&](Impl::Step& planned) {
    DecodeArgs args = impl_->decode_args(0);
    args.batch = int64_t(slots.size());
    const SequenceView* view = planned.views.data();
    std::vector<SequenceView> views(slots.size());
    for (args.layer = 0; args.layer < config.layers; ++args.layer) {
      for (size_t i = 0; i < slots.size(); ++i) {
        views[i] = slots[i] == nullptr ? SequenceView{} : *view++;
      }
      args.sequences = views.data();
      impl_->search_->reserve(args);
    }
  };
  Impl::Step step = impl_->plan(layers, next, Planner::Use::kDecode, stream, false, reserve);
  step.recorded = true;
  impl_->offload_beside(step, stream);
  impl_->carry_out(step, [] {}, [] {}, stream);
  backend.expect_replays(stream);
  impl_->count_step(step, int64_t(slots.size()));
  impl_->look_ahead(sequences, batch);
}

bool Cache::Impl::advance_quietly(const Batch& batch, const std::vector<Sequence*>& sequences,
                                  Stream stream) {
  const auto is_quiet = [](const Sequence* sequence) { return sequence->quiet > 0; };
  if (!std::all_of(sequences.begin(), sequences.end(), is_quiet) || reserved_for_ != batch.ids()) {
    return false;
  }
  std::vector<SequenceView*> views;
  for (Sequence* sequence : sequences) views.push_back(sequence->device.as<SequenceView>());
  offload_pace_.start_beside(true, stream);
  backend_->word_updates()->add_token(views.data(), int64_t(views.size()), config_.layers, stream);
  for (Sequence* sequence : sequences) {
    ++sequence->unsettled, --sequence->quiet;
    stats_.searched_tokens += sequence->searched;
  }
  stats_.decode_tokens += int64_t(sequences.size()) * config_.layers;
  return true;
}

void Cache::Impl::look_ahead(const Batch& batch, const std::vector<Sequence*>& sequences) {
  const bool searches = search_->needs().rows_per_head > 0;
  const int64_t size = batch.size(), crossing = search_->in_full_below(size);
  for (Sequence* sequence : sequences) {
    sequence->quiet = kMostTokens, sequence->searched = 0;
    for (const Layer& layer : sequence->layers) {
      sequence->quiet = std::min(sequence->quiet, planner_.quiet_steps(layer, crossing));
      if (sequence->quiet == 0) break;
      sequence->searched += searches && search_->searches(view(layer), size);
    }
  }
  reserved_for_ = batch.ids();
}

}  // namespace pariskv
