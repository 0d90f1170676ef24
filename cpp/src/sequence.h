/**
 * What a cache holds for one sequence, and how it is made to hold more without ever being
 * half changed: a Change is everything the next state needs, gathered beside the present one;
 * gathering may run out of memory, applying cannot fail.
 */
#pragma once

#include <optional>
#include <vector>

#include "memory/arena.h"
#include "ops.h"
#include "policy/policy.h"
#include "regions.h"
#include "store.h"

namespace pariskv {

/** A view with the sizes that `regions` give it, and no storage. */
SequenceView sizes_of(const Regions& regions, const RegionSizes& sizes, const Policy& policy);

/** One layer of one sequence. */
struct Layer {
  Regions regions;
  LayerStore store;
  Block state;  // the policy's; empty until a token enters the zone

  SequenceView view(const RegionSizes& sizes, const Policy& policy) const;
};

struct Sequence {
  std::vector<Layer> layers;
};

struct Change {
  Layer* layer;
  Regions next;
  std::optional<LayerStore> store;  // absent: what is there has room
  Block state;                      // empty: what is there stays
  int64_t spill_begin, spill_end;   // positions that enter the zone

  int64_t spilled() const { return spill_end - spill_begin; }

  void apply() noexcept {
    if (store) layer->store = std::move(*store);
    if (state.data() != nullptr) layer->state = std::move(state);
    layer->regions = next;
  }
};

/** Makes changes to layers of one cache. */
class Planner {
 public:
  Planner(const ModelShape& shape, const RegionSizes& sizes, const Policy& policy, Backend& backend,
          Arena& arena)
      : shape_(shape), sizes_(sizes), policy_(policy), backend_(backend), arena_(arena) {}

  /** From a layer as it is to `next`, which has as many tokens or more. */
  Change plan(Layer& layer, const Regions& next, Stream stream) const;

  /** An equal layer that shares storage; the policy's state is its own. */
  Layer fork(const Layer& layer, Stream stream) const;

 private:
  const ModelShape& shape_;
  const RegionSizes& sizes_;
  const Policy& policy_;
  Backend& backend_;
  Arena& arena_;
};

}  // namespace pariskv
