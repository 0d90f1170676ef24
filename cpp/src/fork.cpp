// Forks, whole or of the first tokens, and layers that are cut.
#include <algorithm>

#include "sequence.h"

namespace pariskv {

Sequence Planner::fork(const Sequence& sequence, Stream stream,
                       const std::vector<Regions>* cut) const {
  Sequence copy = create(int64_t(sequence.layers.size()), sequence.tail_seed());
  for (size_t l = 0; l < sequence.layers.size(); ++l) {
    const Layer& layer = sequence.layers[l];
    Layer& twin = copy.layers[l];
    twin.regions = layer.regions;
    twin.store = layer.store;
    twin.observed = layer.observed;
    twin.kept = layer.kept;
    twin.tail_copies = layer.tail_copies;
    twin.copied = layer.copied;
    twin.common = layer.common;
    twin.queries = layer.queries;
    twin.dropped = layer.dropped;
    twin.narrow = layer.narrow;
    twin.narrow_end = layer.narrow_end;
    const auto copy_of = [&](const Block& block) {
      if (block.data() == nullptr) return Block();
      Block other = backend_.arena().allocate(block.bytes(), block.holds());
      backend_.copy(other.data(), block.data(), block.bytes(), stream);
      return other;
    };
    twin.recent = copy_of(layer.recent);
    if (cut == nullptr || keeps_state(layer, (*cut)[l])) twin.state = copy_of(layer.state);
    if (cut != nullptr) shorten(twin, (*cut)[l]);
  }
  return copy;
}

int64_t Planner::observed_of(const Layer& layer, int64_t total) const {
  const QueryWindows& wanted = search_.needs().observed;
  const int64_t seen = wanted.before(total);
  // Of a window there is one sum, which cannot be parted.
  return seen < layer.observed ? seen / wanted.size * wanted.size : layer.observed;
}

bool Planner::keeps_state(const Layer& layer, const Regions& next) const {
  return next.zone_tokens(sizes_) > 0 || observed_of(layer, next.total()) > 0;
}

void Planner::shorten(Layer& layer, const Regions& next) const noexcept {
  const int64_t total = next.total(), zone_end = next.retrieval_end(sizes_);
  const int64_t zone_begin = next.sink_end(sizes_);
  if (!keeps_state(layer, next)) layer.state = Block();  // zeros once more, when a zone opens
  layer.observed = observed_of(layer, total);
  layer.dropped = layer.dropped_of(next);
  layer.regions = next;
  layer.queries.end = std::min(layer.queries.end, total);
  layer.queries.begin = std::min(layer.queries.begin, layer.queries.end);
  // Rows that come in their place are copied anew.
  layer.copied.count = std::min(layer.copied.count, layer.copied.count_to(zone_end));
  if (layer.copied.count == 0) layer.tail_copies.reset();
  if (total < layer.fetched_end) {  // other rows may come where fetched ones were
    ++layer.generation;
    layer.fetched_end = zone_end;
  }
  layer.store.drop(total, zone_begin, zone_end);
  layer.narrow_end = std::min(layer.narrow_end, zone_end);
  if (layer.narrow_end <= zone_begin) layer.narrow_end = 0;
  layer.narrow.drop(layer.narrow_end, 0, 0);
}

}  // namespace pariskv
