#include "sequence.h"

#include <algorithm>
#include <cstring>

namespace pariskv {

SequenceView sizes_of(const Regions& regions, const RegionSizes& sizes, const Policy& policy) {
  SequenceView view{};
  view.total = regions.total();
  view.zone_begin = regions.sink_end(sizes);
  view.zone_end = regions.retrieval_end(sizes);
  view.searched = policy.searches(view.total, view.zone_tokens());
  return view;
}

SequenceView Layer::view(const RegionSizes& sizes, const Policy& policy) const {
  SequenceView view = sizes_of(regions, sizes, policy);
  view.rows = store.rows();
  view.summaries = store.summaries();
  view.state = state.data();
  return view;
}

Change Planner::plan(Layer& layer, const Regions& next, Stream stream) const {
  Change change{&layer, next, std::nullopt, Block(), 0, 0};
  change.spill_end = next.retrieval_end(sizes_);
  change.spill_begin = std::max(layer.regions.retrieval_end(sizes_), next.sink_end(sizes_));

  const LayerStore::Writes writes{layer.regions.total(), next.total(), change.spill_begin,
                                  change.spill_end};
  if (!layer.store.ready(shape_.segment_tokens, writes)) {
    change.store = layer.store.planned(
        shape_.segment_tokens, {shape_.segment_row_bytes(), policy_.summary_bytes()}, writes,
        arena_, [&](void* target, const void* source, int64_t bytes) {
          backend_.copy(target, source, bytes, stream);
        });
  }
  if (change.spilled() > 0 && layer.state.data() == nullptr) {
    change.state = arena_.allocate(policy_.state_bytes());
    std::memset(change.state.data(), 0, size_t(policy_.state_bytes()));
  }
  return change;
}

Layer Planner::fork(const Layer& layer, Stream stream) const {
  Layer copy;
  copy.regions = layer.regions;
  copy.store = layer.store;
  if (layer.state.data() != nullptr) {
    copy.state = arena_.allocate(layer.state.bytes());
    backend_.copy(copy.state.data(), layer.state.data(), layer.state.bytes(), stream);
  }
  return copy;
}

}  // namespace pariskv
