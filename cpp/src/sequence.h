/**
 * The contents of a cache for one sequence, and how they grow without ever being
 * half changed: a Change is everything the next state needs, gathered beside the present one;
 * gathering may run out of memory, applying cannot fail.
 */
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "gpu/device_tables.h"
#include "ops.h"
#include "regions.h"
#include "search.h"
#include "store.h"

namespace pariskv {

/**
 * A layer's regions, how a zone of this size is searched, and whether it is.
 * @param facts  all but what follows from the regions
 */
SequenceView view_of(const Regions& regions, const RegionSizes& sizes, const Search& search,
                     StepFacts facts);

/** One layer of one sequence. */
struct Layer {
  Regions regions;
  LayerStore store;
  Block state;      // the search's; empty until a token enters the zone
  Block row_cache;  // empty until a decode searches, and where nothing is fetched
  DeviceTables tables;
  int64_t generation = 0;              // of the row cache
  int64_t fetched_end = 0;             // no row from here on has been fetched in this generation
  int64_t observed = 0;                // queries that the search was given, of those it wants
  std::shared_ptr<Block> kept;         // kept rows; null: none are. Forks share it
  std::shared_ptr<Block> tail_copies;  // of rows of `copied`; forks share it
  Tail copied{};
  int64_t common = 0;      // rows that set the common part of the copies
  uint32_t tail_seed = 0;  // that rows of the tail are drawn by: of the sequence, and of its forks
  Block recent;            // queries; empty until one is remembered
  Positions queries{};     // whose queries are in there
  Positions dropped{};     // whose rows were given back: whole segments of the zone; or none
  LayerStore narrow;       // rows of the zone where they are narrow; no summaries
  int64_t narrow_end = 0;  // rows behind the sink up to here are in `narrow`: those of the zone

  /** The rows of the zone. */
  LayerStore& zone_rows(const ModelShape& shape) { return shape.narrows() ? narrow : store; }
  const LayerStore& zone_rows(const ModelShape& shape) const {
    return shape.narrows() ? narrow : store;
  }

  /** Copies of rows of the tail, if all of this tail are among them; null: they are not. */
  char* copies_of(const Tail& tail, const Search& search) const;

  /** @param heads  kv heads of the batch that it is stepped with; 0: of no step */
  SequenceView view(const RegionSizes& sizes, const Search& search, int64_t heads = 0) const;

  /** What the mode of such a step follows from. */
  StepFacts facts(int64_t heads) const;

  /** Of the dropped positions, those of the layer once it has been cut to `next`. */
  Positions dropped_of(const Regions& next) const {
    return next.total() > dropped.begin ? dropped : Positions{};
  }

  /** The layer once it has been cut to `next`; where rows are kept of its zone, without these. */
  SequenceView cut(const Regions& next, const RegionSizes& sizes, const Search& search) const;

 private:
  /** With where everything lies but kept rows. */
  SequenceView placed(SequenceView view, const Search& search) const;
};

struct Sequence {
  Block device;  // (layers) SequenceView; empty where the backend keeps no tables
  std::vector<Layer> layers;
  int64_t used = 0;  // the number of the last call that named it

  uint32_t tail_seed() const { return layers.front().tail_seed; }
};

/** Rows that are to go to host memory, and their place there. */
struct PlannedOffload {
  int64_t segment;
  std::shared_ptr<RowBlock> rows;
  Block target;
};

/** Room for rows and for what goes with them, and rows that will be on their way. */
struct RowsChange {
  std::optional<LayerStore::Growth> growth;  // absent: the store has room
  Block state;                               // empty: the layer's own stays
  Block row_cache;                           // the same
  Block tables;                              // empty: the tables have room
  Positions entering{};                      // the zone; may end before it begins: none
  std::vector<PlannedOffload> offloads;

  void apply(Layer& layer) noexcept;
};

/** Rows that are narrow from now on, and blocks of plain ones that are given back for it. */
struct NarrowChange {
  std::optional<LayerStore::Growth> growth;  // absent: the store has room
  Positions entering{};                      // whose rows are to be written narrow; or none
  int64_t end = 0;                           // Layer::narrow_end as it will be
  Positions freed{};                         // blocks of plain rows

  void apply(Layer& layer) noexcept;
};

/** Queries that are remembered, and those that the search is given. */
struct QueriesChange {
  Block recent;            // empty: the layer's own stays
  Positions remembered{};  // that will be
  Positions asked{};       // whose queries may choose what is kept; or none
  int64_t observed = 0;    // that the search will have been given

  void apply(Layer& layer) noexcept;
};

/** Which rows of the zone are kept, and which are given back. */
struct KeptRowsChange {
  std::shared_ptr<Block> kept;  // to be filled; null: the layer's own stays, if any
  Positions asked{};            // whose queries choose; none: nothing is chosen
  bool whole = false;           // they choose from all of the zone
  bool forgets = false;         // nothing is kept of the zone any more
  Positions dropped{};          // of the zone, whose rows will have been given back
  Positions freed{};            // segments whose rows are given back by this change

  bool chooses() const { return asked.begin < asked.end; }
  void apply(Layer& layer) noexcept;
};

/** Rows of the tail that are to be copied, of which `from` are there. */
struct TailChange {
  std::shared_ptr<Block> copies;  // null: the layer's own is written to, if any
  Tail tail{};
  int64_t common = 0;  // as Layer::common
  int64_t from = 0;    // at tail.count: nothing is to be done

  bool copies_any() const { return from < tail.count; }
  void apply(Layer& layer) noexcept;
};

struct Change {
  Layer* layer;
  Regions next;
  RowsChange rows;
  QueriesChange queries;
  KeptRowsChange kept;
  TailChange tail;
  NarrowChange narrow;
  int64_t heads = 0;  // kv heads of the step's batch; 0: of no step

  StepFacts facts() const;
  int64_t entering() const { return rows.entering.end - rows.entering.begin; }
  int64_t row_blocks() const {
    return rows.growth ? rows.growth->row_blocks() : layer->store.row_blocks();
  }
  /** The kept rows that there will be; null: none. */
  const Block* kept_rows() const {
    return (kept.kept || kept.forgets ? kept.kept : layer->kept).get();
  }
  /** Blocks of rows that will be in host memory, ascending. */
  std::vector<int64_t> hosted() const {
    return layer->store.hosted(rows.growth ? &*rows.growth : nullptr);
  }

  /** The layer after this change. */
  SequenceView view(const RegionSizes& sizes, const Search& search) const;

  /**
   * Sends it to the device.
   * @param freed  segments whose rows the tables are not to name any more
   */
  void publish(const SequenceView& view, const Positions& freed, WordUpdates* updates) {
    const auto& growth = narrow.growth;
    const int64_t narrow_blocks = growth ? growth->row_blocks() : layer->narrow.row_blocks();
    layer->tables.publish(view, row_blocks(), narrow_blocks, freed, rows.tables, updates);
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
    int64_t heads = 0;  // kv heads of a decode's batch
  };

  /** From a layer as it is to `next`, which has as many tokens or more. */
  Change plan(Layer& layer, const Regions& next, const Purpose& purpose, Stream stream) const;

  /**
   * Tokens that steps can add to a layer before anything but its length changes: until it flushes,
   * needs a segment, or is searched in another way.
   * @param heads  kv heads of the steps' batch
   */
  int64_t quiet_steps(const Layer& layer, int64_t heads) const;

  /** Whether rows are selected that may lie in host memory, and there is no place to keep them. */
  bool lacks_row_cache(const Layer& layer) const;

  /** From a layer to one whose rows behind the sink up to `end` are narrow: those of its zone. */
  NarrowChange plan_narrow(Layer& layer, const Regions& next, int64_t end, Stream stream) const;

  /** The same of a planned change, to another end: more rows than its zone has are narrow. */
  void extend_narrow(Change& change, int64_t end, Stream stream) const;

  /** Blocks of plain rows for those that a cut brings back from the zone; none: they are there. */
  std::optional<LayerStore::Growth> plan_return(Layer& layer, const Positions& returning,
                                                Stream stream) const;

  /** The search's state to be changed: empty when the layer's own can be. */
  Block next_state(const Layer& layer, Stream stream) const;

  /** A block for the rows that are kept of such a zone. */
  std::shared_ptr<Block> new_kept(const SequenceView& view) const;

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

  /** Queries of the first `total` tokens that the search was given. */
  int64_t observed_of(const Layer& layer, int64_t total) const;

  Block new_row_cache(Stream stream) const;
  /** Whether rows of the zone may be in host memory. */
  bool fetches(const Layer& layer) const {
    return offloads_ || layer.zone_rows(shape_).has_moved();
  }
  /** Whether a search fetches rows from there, and so keeps some in a row cache. */
  bool caches_rows(const Layer& layer) const {
    return fetches(layer) && shape_.cached_rows > 0 && search_.needs().rows_per_head > 0;
  }
  QueriesChange plan_queries(const Growing& plan, bool queries) const;
  RowsChange plan_rows(const Growing& plan, const QueriesChange& queries) const;
  void plan_drop(const Growing& plan, const Positions& asked, KeptRowsChange& kept) const;
  KeptRowsChange plan_kept(const Growing& plan, const Positions& asked) const;
  std::vector<PlannedOffload> plan_offloads(const Growing& plan, const Change& change) const;
  TailChange plan_tail(const Growing& plan, const SequenceView& next) const;

  const ModelShape& shape_;
  const RegionSizes& sizes_;
  const Search& search_;
  Backend& backend_;
  const bool offloads_;
};

}  // namespace pariskv
