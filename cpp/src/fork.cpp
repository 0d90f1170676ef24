// Forks, whole or of the first tokens, and layers that are cut.
#include <algorithm>

#include "sequence.h"

namespace pariskv {

PartBlock Planner::forked(Part part, const PartBlock& block, Stream stream) const {
  const OnFork how = rules_of(part).on_fork;
  if (!block || how == OnFork::kLacks) return nullptr;
  return how == OnFork::kShares ? block : copy_of(*block, stream);
}

Sequence Planner::fork(const Sequence& sequence, Stream stream,
                       const std::vector<Regions>* cut) const {
  Sequence copy = create(int64_t(sequence.layers.size()), sequence.tail_seed());
  copy.left = sequence.left;
  for (size_t l = 0; l < sequence.layers.size(); ++l) {
    const Layer& layer = sequence.layers[l];
    Layer& twin = copy.layers[l];
    twin.regions = layer.regions;
    twin.store = layer.store;
    twin.narrow = layer.narrow;
    twin.marks = layer.marks;
    for (Part part : kAllParts) {
      // Of nothing that is left, nothing is known.
      if (part == Part::kState && cut != nullptr && !keeps_state(layer, (*cut)[l])) continue;
      twin.parts[part] = forked(part, layer.parts[part], stream);
    }
    if (cut != nullptr) shorten(twin, (*cut)[l]);
  }
  return copy;
}

int64_t Planner::observed_of(const Layer& layer, int64_t total) const {
  const QueryWindows& wanted = search_.needs().observed;
  const int64_t seen = wanted.before(total), known = layer.marks.observed;
  // Of a window there is one sum, which cannot be parted.
  return seen < known ? seen / wanted.size * wanted.size : known;
}

bool Planner::keeps_state(const Layer& layer, const Regions& next) const {
  return next.zone_tokens(sizes_) > 0 || observed_of(layer, next.total()) > 0;
}

void Planner::shorten(Layer& layer, const Regions& next) const noexcept {
  const int64_t total = next.total(), zone_end = next.retrieval_end(sizes_);
  const int64_t zone_begin = next.sink_end(sizes_);
  if (!keeps_state(layer, next)) layer.parts[Part::kState].reset();  // zeros, when a zone opens
  layer.marks.observed = observed_of(layer, total);
  layer.marks.cut(total, zone_begin, zone_end);
  if (layer.marks.copied.count == 0) layer.parts[Part::kTailCopies].reset();
  if (total < layer.marks.fetched_end) {  // other rows may come where fetched ones were
    ++layer.generation;
    layer.marks.fetched_end = zone_end;
  }
  layer.regions = next;
  layer.store.drop(total, zone_begin, zone_end);
  layer.narrow.drop(layer.marks.narrow_end, 0, 0);
}

}  // namespace pariskv
