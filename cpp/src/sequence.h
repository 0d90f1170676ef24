/**
 * The contents of a cache for one sequence, and how they grow without ever being
 * half changed: a Change is everything the next state needs, gathered beside the present one;
 * gathering may run out of memory, applying cannot fail.
 */
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "gpu/device_tables.h"
#include "ops.h"
#include "policy/policy.h"
#include "regions.h"
#include "store.h"

namespace pariskv {

/** One layer of one sequence. */
struct Layer {
  Regions regions;
  LayerStore store;
  Block state;      // the policy's; empty until a token enters the zone
  Block row_cache;  // empty until a decode searches, and where nothing is fetched
  DeviceTables tables;
  int64_t generation = 0;       // of the row cache
  int64_t fetched_end = 0;      // no row from here on has been fetched in this generation
  int64_t observed = 0;         // queries that the policy was given, of those it wants
  std::shared_ptr<Block> kept;  // rows of kept_tail, or those that the policy keeps; forks share it
  Tail kept_tail{};
  Block recent;         // queries; empty until one is remembered
  Positions queries{};  // whose queries are in there
  Positions dropped{};  // whose rows were given back: whole segments of the zone; or none

  /** The kept rows, if all of this tail are among them. */
  char* kept_rows(const Tail& tail) const;

  SequenceView view(const RegionSizes& sizes, const Policy& policy) const;

  /** Of the dropped positions, those of the layer once it has been cut to `next`. */
  Positions dropped_of(const Regions& next) const {
    return next.total() > dropped.begin ? dropped : Positions{};
  }

  /** The layer once it has been cut to `next`; where rows are kept of its zone, without these. */
  SequenceView cut(const Regions& next, const RegionSizes& sizes, const Policy& policy) const;
};

struct Sequence {
  Block device;  // (layers) SequenceView; empty where the backend keeps no tables
  std::vector<Layer> layers;
};

/** Rows that are to go to host memory, and their place there. */
struct PlannedOffload {
  int64_t segment;
  std::shared_ptr<RowBlock> rows;
  Block target;
};

struct Change {
  Layer* layer;
  Regions next;
  std::optional<LayerStore::Growth> growth;  // absent: the store has room
  Block state;                               // empty: the layer's own stays
  Block row_cache;                           // the same
  Block tables;                              // empty: the tables have room
  int64_t spill_begin, spill_end;            // positions that enter the zone
  int64_t observed;                          // queries that the policy will have been given
  std::shared_ptr<Block> kept;               // null: the layer's own is written to, if any
  Tail tail;                                 // rows to be kept, of which `kept_from` are there
  int64_t kept_from;                         // at tail.count: nothing is to be done
  bool forgets;                              // nothing is kept of the zone any more
  Block recent;                              // empty: the layer's own stays
  Positions queries;                         // that will be remembered
  Positions asked;                           // whose queries choose what is kept; or none
  bool whole;                                // they choose from all of the zone
  Positions dropped;                         // of the zone, whose rows will have been given back
  Positions freed;                           // segments whose rows are given back by this change
  std::vector<PlannedOffload> offloads;

  int64_t spilled() const { return spill_end - spill_begin; }
  bool keeps() const { return kept_from < tail.count; }
  bool chooses() const { return asked.begin < asked.end; }
  int64_t segments() const { return growth ? growth->segments() : layer->store.segments(); }
  /** Segments whose rows will be in host memory, ascending. */
  std::vector<int64_t> hosted() const { return layer->store.hosted(growth ? &*growth : nullptr); }

  /** The layer after this change. */
  SequenceView view(const RegionSizes& sizes, const Policy& policy) const;

  /** Sends it to the device. */
  void publish(const SequenceView& view, WordUpdates* updates) {
    layer->tables.publish(view, segments(), tables, updates);
  }

  /** Words that were sent may not have arrived; rows that were fetched may be written anew. */
  void drop() noexcept {
    layer->tables.forget();
    ++layer->generation;
  }

  void apply() noexcept {
    if (growth) layer->store.grow(std::move(*growth));
    if (state.data() != nullptr) layer->state = std::move(state);
    if (row_cache.data() != nullptr) layer->row_cache = std::move(row_cache);
    layer->regions = next;
    layer->observed = observed;
    if (keeps()) layer->kept_tail = tail;
    if (kept || forgets) layer->kept = std::move(kept);
    if (recent.data() != nullptr) layer->recent = std::move(recent);
    layer->queries = queries;
    layer->dropped = dropped;
    layer->store.give_back(freed.begin, freed.end);
    layer->fetched_end = std::max(layer->fetched_end, spill_end);
  }
};

/** Makes changes to layers of one cache. */
class Planner {
 public:
  Planner(const ModelShape& shape, const RegionSizes& sizes, const Policy& policy, Backend& backend,
          bool offloads)
      : shape_(shape), sizes_(sizes), policy_(policy), backend_(backend), offloads_(offloads) {}

  /** An empty sequence of so many layers. */
  Sequence create(int64_t layers) const;

  /** The use that a layer is made ready for. */
  enum class Use { kStore, kDecode };

  /**
   * From a layer as it is to `next`, which has as many tokens or more.
   * @param queries  of the new tokens will be given to the policy, as far as it wants them, and are
   *                 remembered before anything is chosen
   */
  Change plan(Layer& layer, const Regions& next, Use use, bool queries, Stream stream) const;

  /** Which of the new tokens' queries a change gives to the policy: [begin, end), or none. */
  Positions observes(const Change& change) const;

  /** The policy's state to be changed: empty when the layer's own can be. */
  Block next_state(const Layer& layer, Stream stream) const;

  /** A block for what the policy keeps of such a zone. */
  std::shared_ptr<Block> new_kept(const SequenceView& view) const;

  /** An equal sequence that shares storage; the policy's state is its own, as is its row cache. */
  Sequence fork(const Sequence& sequence, Stream stream) const;

 private:
  Block new_row_cache(Stream stream) const;
  void plan_queries(Change& change, Use use, bool queries, Stream stream) const;
  void plan_drop(Change& change, Use use) const;
  void plan_choice(Change& change, const SequenceView& next) const;
  void plan_offload(Change& change, Use use) const;
  void plan_kept(Change& change, const SequenceView& next, Stream stream) const;

  const ModelShape& shape_;
  const RegionSizes& sizes_;
  const Policy& policy_;
  Backend& backend_;
  const bool offloads_;
};

}  // namespace pariskv
