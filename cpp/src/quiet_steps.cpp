#include "quiet_steps.h"

#include <algorithm>
#include <utility>

namespace pariskv {

Slots::Slots(const std::vector<Sequence*>& batch, int64_t layer) : all(int64_t(batch.size())) {
  layers.reserve(batch.size());
  numbers.reserve(batch.size());
  for (int64_t slot = 0; slot < all; ++slot) {
    if (batch[size_t(slot)] == nullptr) continue;
    if (runs.empty() || numbers.back() + 1 != slot) {
      runs.push_back({slot, int64_t(layers.size()), 0});
    }
    ++runs.back().count;
    layers.push_back(&batch[size_t(slot)]->layers[size_t(layer)]);
    numbers.push_back(slot);
  }
}

std::vector<SequenceView> Slots::spread(const SequenceView* views) const {
  std::vector<SequenceView> spread(size_t(all), SequenceView{});
  for (const int64_t slot : numbers) spread[size_t(slot)] = *views++;
  return spread;
}

BatchLayer::BatchLayer(Slots of)
    : slots(std::move(of)),
      views(size_t(slots.all), SequenceView{}),
      quiet_until(slots.layers.size(), -1) {
  places.reserve(slots.layers.size());
  for (size_t i = 0; i < slots.layers.size(); ++i) {
    places.push_back(slots.layers[i]->tables.device());
    view(i).total = slots.layers[i]->regions.total();
  }
}

void BatchLayer::count(int64_t tokens) {
  for (const int64_t slot : slots.numbers) views[size_t(slot)].total += tokens;
}

void BatchLayer::look(const Search& search) {
  left = slots.layers.empty() ? -1 : kMostTokens, searched = 0;
  for (size_t i = 0; i < slots.layers.size(); ++i) {
    left = std::min(left, quiet_until[i] - view(i).total);
    searched += search.searches(view(i), slots.all);
  }
}

void BatchLayer::settle(size_t i) const noexcept {
  Layer& layer = *slots.layers[i];
  const int64_t tokens = view(i).total - layer.regions.total();
  if (tokens == 0) return;
  layer.regions = layer.regions.appended(tokens);
  layer.tables.note_total(layer.regions.total());
}

BatchLayer* QuietSteps::find(const std::vector<SequenceId>& ids, int64_t layer) {
  if (layers_.empty() || ids_ != ids || !layers_[size_t(layer)]) return nullptr;
  return &*layers_[size_t(layer)];
}

BatchLayer& QuietSteps::add(const std::vector<SequenceId>& ids,
                            const std::vector<Sequence*>& sequences, int64_t layers,
                            int64_t layer) {
  settle();
  BatchLayer first(Slots(sequences, layer));
  if (layers_.empty() || ids_ != ids) {
    end();
    ids_ = ids;
    sequences_ = sequences;
    layers_.resize(size_t(layers));
  }
  return layers_[size_t(layer)].emplace(std::move(first));
}

void QuietSteps::settle() noexcept {
  if (!untold_) return;
  untold_ = false;
  for (const auto& layer : layers_) {
    for (size_t i = 0; layer && i < layer->slots.layers.size(); ++i) layer->settle(i);
  }
  for (Sequence* sequence : sequences_) {
    if (sequence != nullptr) sequence->used = std::max(sequence->used, call_);
  }
}

void QuietSteps::end() noexcept {
  settle();
  layers_.clear();
  sequences_.clear();
}

void QuietSteps::plan(const Layer& layer) noexcept {
  for (auto& known : layers_) {
    if (!known) continue;
    const auto& all = known->slots.layers;
    const auto found = std::find(all.begin(), all.end(), &layer);
    if (found == all.end()) continue;
    known->quiet_until[size_t(found - all.begin())] = -1;
    known->left = -1;
  }
}

}  // namespace pariskv
