/** The contents of a cache for one sequence, layer by layer. */
#pragma once

#include <vector>

#include "gpu/device_tables.h"
#include "ops.h"
#include "parts.h"
#include "regions.h"
#include "search.h"
#include "store.h"

namespace pariskv {

inline bool any(const Positions& positions) { return positions.begin < positions.end; }

/**
 * A layer's regions, how a zone of this size is searched, and whether it is.
 * @param facts  all but what follows from the regions
 */
SequenceView view_of(const Regions& regions, const RegionSizes& sizes, const Search& search,
                     StepFacts facts);

/** The tokens in a layer's parts and stores. A fork's are the same. */
struct Marks {
  int64_t observed = 0;     // queries that the state was given, of those that the search wants
  int64_t fetched_end = 0;  // no row from here on was fetched to the row cache in its generation
  Tail copied{};            // rows that have copies
  int64_t common = 0;       // of them, rows that set their common part
  Positions queries{};      // whose queries are remembered
  Positions dropped{};      // whose rows were given back: whole segments of the zone; or none
  int64_t narrow_end = 0;   // rows behind the sink up to here are narrow: those of the zone

  /** Whether all of this tail have copies, with the common part that it asks for. */
  bool has_copies(const Tail& tail, const Search& search) const;

  /** The tokens that a cut leaves in parts; of those behind `zone_end` none are in the zone. */
  void cut(int64_t total, int64_t zone_begin, int64_t zone_end);

  /** Of the dropped positions, those that are left once the layer has so many tokens. */
  Positions dropped_of(int64_t total) const {
    return total > dropped.begin ? dropped : Positions{};
  }
};

/** The tail of such a zone. */
Tail tail_of(const SequenceView& view, const Search& search);

/** The memory that a step reads. */
struct Places {
  void* const* rows;
  uint8_t* const* summaries;
  void* const* narrow_rows;
  const Parts* parts;  // null, or newer ones than the layer's
  const Marks* marks;
};

/** One layer of one sequence. */
struct Layer {
  int64_t number = 0;  // of all layers of the sequence
  Regions regions;
  LayerStore store;
  LayerStore narrow;  // rows of the zone where they are narrow; no summaries
  Parts parts;
  Marks marks;
  DeviceTables tables;
  int64_t generation = 0;  // of the row cache
  uint32_t tail_seed = 0;  // that rows of the tail are drawn by: of the sequence, and of its forks

  /** The rows of the zone. */
  LayerStore& zone_rows(const ModelShape& shape) { return shape.narrows() ? narrow : store; }
  const LayerStore& zone_rows(const ModelShape& shape) const {
    return shape.narrows() ? narrow : store;
  }

  /** @param near_from  StepFacts::near_from */
  SequenceView view(const RegionSizes& sizes, const Search& search, int64_t near_from = 0) const;

  /** What the mode of such a step follows from. */
  StepFacts facts(int64_t near_from) const;

  /** Whether all rows are plain, and none is in host memory beside a GPU. */
  bool near() const { return narrow.rows() == nullptr && !store.has_moved(); }

  /** The layer once it has been cut to `next`; where rows are kept of its zone, without these. */
  SequenceView cut(const Regions& next, const RegionSizes& sizes, const Search& search) const;

  /** With all addresses. */
  SequenceView placed(SequenceView view, const Places& places, const Search& search) const;

  Places places() const {
    return {store.rows(), store.summaries(), narrow.rows(), nullptr, &marks};
  }
};

struct Sequence {
  Block device;  // (layers) SequenceView; empty where the backend keeps no tables
  std::vector<Layer> layers;
  int64_t used = 0;  // the number of the last call that named it
  int64_t left = 0;  // segments up to here have no row on the device that is to stay there, unless
                     // some have come back

  uint32_t tail_seed() const { return layers.front().tail_seed; }
};

}  // namespace pariskv
