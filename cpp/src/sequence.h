/**
 * How a sequence grows without ever being half changed: a Change is everything the next state of a
 * layer needs, gathered beside the present one; gathering may run out of memory, applying cannot
 * fail.
 */
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "layer.h"

namespace pariskv {

/** Rows that are to go to host memory, and their place there. */
struct PlannedOffload {
  int64_t segment;
  std::shared_ptr<RowBlock> rows;
  Block target;
};

/** The work of verbs for a change, done before it counts. */
struct Work {
  Positions entering{};              // the zone; may end before it begins: none
  Positions narrowing{};             // whose rows are written narrow; or none
  std::optional<int64_t> tail_from;  // rows of the tail from here on are copied; absent: none
  Positions asked{};                 // whose queries choose which rows are kept; or none
  bool whole = false;                // they choose from all of the zone

  bool chooses() const { return any(asked); }
};

struct Change {
  Layer* layer;
  Regions next;
  int64_t near_from = 0;  // StepFacts::near_from

  std::optional<LayerStore::Growth> growth;         // of the store; absent: it has room
  std::optional<LayerStore::Growth> narrow_growth;  // of the one of narrow rows; the same
  Parts parts;                                      // null: the layer's own stays
  bool forgets_kept = false;                        // nothing is kept of the zone any more
  Block tables;                                     // empty: the tables have room
  Marks marks;                                      // as they will be
  std::vector<PlannedOffload> offloads;
  Positions freed{};        // segments whose rows are given back
  Positions freed_plain{};  // blocks of rows that are, for they are narrow now
  Work work;

  StepFacts facts() const;
  int64_t entering() const { return work.entering.end - work.entering.begin; }
  int64_t row_blocks() const { return growth ? growth->row_blocks() : layer->store.row_blocks(); }
  /** Blocks of rows that will be in host memory, ascending. */
  std::vector<int64_t> hosted() const { return layer->store.hosted(growth ? &*growth : nullptr); }

  /** The layer after this change. */
  SequenceView view(const RegionSizes& sizes, const Search& search) const;

  /**
   * Sends it to the device.
   * @param gone  segments whose rows the tables are not to name any more
   */
  void publish(const SequenceView& view, const Positions& gone, WordUpdates* updates) {
    const int64_t narrow_blocks =
        narrow_growth ? narrow_growth->row_blocks() : layer->narrow.row_blocks();
    layer->tables.publish(view, row_blocks(), narrow_blocks, gone, tables, updates);
  }

  /** Words that were sent may not have arrived; rows that were fetched may be written anew. */
  void drop() noexcept {
    layer->tables.forget();
    ++layer->generation;
  }

  void apply() noexcept;
};

/** Makes changes to layers of one cache. */
class Planner {
 public:
  /** @param offloads  rows leave for host memory as soon as they are in the zone */
  Planner(const ModelShape& shape, const RegionSizes& sizes, const Search& search, Backend& backend,
          bool offloads)
      : shape_(shape), sizes_(sizes), search_(search), backend_(backend), offloads_(offloads) {}

  /** An empty sequence of so many layers, whose tails are drawn by `tail_seed`. */
  Sequence create(int64_t layers, uint32_t tail_seed) const;

  /** The use that a layer is made ready for. */
  enum class Use { kStore, kDecode };
  struct Purpose {
    Use use = Use::kStore;
    /**
     * Of the new tokens will be given to the search, as far as it wants them, and are remembered
     * before anything is chosen.
     */
    bool queries = false;
    StepBatch batch{};  // of a decode
  };

  /** From a layer as it is to `next`, which has as many tokens or more. */
  Change plan(Layer& layer, const Regions& next, const Purpose& purpose, Stream stream) const;

  /**
   * Tokens that steps can add to a layer before anything but its length changes: until it flushes,
   * needs a segment, or is searched in another way.
   * @param batch  that it is stepped with
   */
  int64_t quiet_steps(const Layer& layer, const StepBatch& batch) const;

  /** Whether rows are selected that may lie in host memory, and there is no place to keep them. */
  bool lacks_row_cache(const Layer& layer) const;

  /** Rows behind the sink up to `end` will be narrow: more than those of the zone. */
  void extend_narrow(Change& change, int64_t end, Stream stream) const;

  /** Blocks of plain rows for those that a cut brings back from the zone; none: they are there. */
  std::optional<LayerStore::Growth> plan_return(Layer& layer, const Positions& returning,
                                                Stream stream) const;

  /**
   * A block for a part that is about to change; null: it can change where it is.
   * @param view  of the zone that it will be of
   * @param how   where it can; without, as its rules say
   */
  PartBlock next_part(Part part, const Layer& layer, const SequenceView& view, OnWrite how,
                      Stream stream) const;
  PartBlock next_part(Part part, const Layer& layer, const SequenceView& view,
                      Stream stream) const {
    return next_part(part, layer, view, rules_of(part).on_write, stream);
  }
  PartBlock next_state(const Layer& layer, Stream stream) const {
    return next_part(Part::kState, layer, {}, stream);
  }

  /**
   * An equal sequence that shares storage; the search's state is its own, as is its row cache.
   * @param cut  null, or the regions of each layer, with as many tokens or fewer. What the search
   *             knows of a zone that is cut, and rows that come back from it, are to be put right.
   */
  Sequence fork(const Sequence& sequence, Stream stream,
                const std::vector<Regions>* cut = nullptr) const;

  /** Whether the search still has to know something of a layer that is cut to `next`. */
  bool keeps_state(const Layer& layer, const Regions& next) const;

  /** Cuts a layer to `next`: its state, kept rows and rows of the window are right already. */
  void shorten(Layer& layer, const Regions& next) const noexcept;

 private:
  struct Growing;  // what a plan begins with

  PartBlock copy_of(const Block& block, Stream stream) const;

  /** What a fork has of a block. */
  PartBlock forked(Part part, const PartBlock& block, Stream stream) const;

  /** Queries of the first `total` tokens that the search was given. */
  int64_t observed_of(const Layer& layer, int64_t total) const;

  /** Whether rows of the zone may be in host memory. */
  bool fetches(const Layer& layer) const {
    return offloads_ || layer.zone_rows(shape_).has_moved();
  }
  /** Whether a search fetches rows from there, and so keeps some in a row cache. */
  bool caches_rows(const Layer& layer) const {
    return fetches(layer) && shape_.cached_rows > 0 && search_.needs().rows_per_head > 0;
  }
  // Each plans one matter of a change, in this order.
  void plan_queries(const Growing& plan, bool queries, Change& change) const;
  void plan_rows(const Growing& plan, Change& change) const;
  void plan_narrow(const Growing& plan, int64_t end, Change& change) const;
  void plan_drop(const Growing& plan, const Positions& asked, Change& change) const;
  void plan_kept(const Growing& plan, Change& change) const;
  void plan_offloads(const Growing& plan, Change& change) const;
  void plan_tail(const Growing& plan, const SequenceView& next, Change& change) const;

  const ModelShape& shape_;
  const RegionSizes& sizes_;
  const Search& search_;
  Backend& backend_;
  const bool offloads_;
};

}  // namespace pariskv
