#include "step_cursor.h"

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
      quiet_until(slots.layers.size(), -1),
      in_full(slots.layers.size(), false) {
  places.reserve(slots.layers.size());
  for (size_t i = 0; i < slots.layers.size(); ++i) {
    places.push_back(slots.layers[i]->tables.device());
    view(i).total = slots.layers[i]->regions.total();
  }
}

void BatchLayer::count(int64_t tokens) {
  for (const int64_t slot : slots.numbers) views[size_t(slot)].total += tokens;
}

void BatchLayer::look() {
  left = slots.layers.empty() ? -1 : kMostTokens, searched = 0;
  for (size_t i = 0; i < slots.layers.size(); ++i) {
    left = std::min(left, quiet_until[i] - view(i).total);
    searched += view(i).mode == StepMode::kSearched;
  }
}

void BatchLayer::settle(size_t i) const noexcept {
  Layer& layer = *slots.layers[i];
  const int64_t tokens = view(i).total - layer.regions.total();
  if (tokens == 0) return;
  layer.regions = layer.regions.appended(tokens);
  layer.tables.note_total(layer.regions.total());
}

bool StepCursor::knows(const std::vector<SequenceId>& ids, LayerRange range) const {
  if (layers_.empty() || ids_ != ids) return false;
  const auto first = layers_.begin() + range.first;
  return std::all_of(first, first + range.count, [](const auto& layer) { return bool(layer); });
}

void StepCursor::add(const std::vector<SequenceId>& ids, const std::vector<Sequence*>& sequences,
                     LayerRange range) {
  settle();
  if (layers_.empty() || ids_ != ids) {
    end();
    ids_ = ids;
    sequences_ = sequences;
    layers_.resize(size_t(all_.count));
  }
  for (int64_t l = range.first; l < range.first + range.count; ++l) {
    if (!layers_[size_t(l)]) layers_[size_t(l)].emplace(Slots(sequences, l));
  }
  changed();
}

void StepCursor::fold() noexcept {
  if (unfolded_ == 0) return;
  for (auto& layer : layers_) {
    if (layer) layer->count(unfolded_), layer->left -= unfolded_;
  }
  changed();
  unfolded_ = 0;
}

BatchLayer& StepCursor::layer(int64_t number) {
  fold();
  return *layers_[size_t(number)];
}

const StepCursor::Whole& StepCursor::whole() {
  if (!whole_) {
    fold();
    whole_ = Whole{kMostTokens, 0, std::vector<bool>(layers_.front()->in_full.size(), true)};
    for (const auto& layer : layers_) {
      whole_->left = std::min(whole_->left, layer->left);
      whole_->searched += layer->searched;
      for (size_t i = 0; i < layer->in_full.size(); ++i) {
        whole_->in_full[i] = whole_->in_full[i] && layer->in_full[i];
      }
    }
  }
  return *whole_;
}

int64_t StepCursor::left(LayerRange range) {
  if (!is_whole(range)) return layer(range.first).left;
  const int64_t left = whole().left;
  return left < 0 ? left : left - unfolded_;
}

const std::vector<SequenceView*>& StepCursor::places(LayerRange range) const {
  return layers_[size_t(range.first)]->places;
}

int64_t StepCursor::searched(LayerRange range) {
  return is_whole(range) ? whole().searched : layer(range.first).searched;
}

const std::vector<bool>& StepCursor::in_full() {
  if (all_.count > 1) return whole().in_full;
  return layers_.front()->in_full;
}

void StepCursor::count(LayerRange range, int64_t tokens) noexcept {
  if (is_whole(range)) {
    unfolded_ += tokens;
    return;
  }
  BatchLayer& at = layer(range.first);
  at.count(tokens), at.left -= tokens;
  changed();
}

void StepCursor::settle() noexcept {
  fold();
  if (!untold_) return;
  untold_ = false;
  for (const auto& layer : layers_) {
    for (size_t i = 0; layer && i < layer->slots.layers.size(); ++i) layer->settle(i);
  }
  for (Sequence* sequence : sequences_) {
    if (sequence != nullptr) sequence->used = std::max(sequence->used, call_);
  }
}

void StepCursor::end() noexcept {
  settle();
  layers_.clear();
  sequences_.clear();
  changed();
}

void StepCursor::plan(const Layer& layer) noexcept {
  for (auto& known : layers_) {
    if (!known) continue;
    const auto& all = known->slots.layers;
    const auto found = std::find(all.begin(), all.end(), &layer);
    if (found == all.end()) continue;
    known->quiet_until[size_t(found - all.begin())] = -1;
    known->left = -1;
    changed();
  }
}

}  // namespace pariskv
