/**
 * What the sequences of a cache take, by name and place, before there is a cache. Every count of
 * bytes ahead of time follows from here: Config::footprint, its two sums, and what a cache
 * reserves.
 */
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "layer.h"

namespace pariskv {

class Ledger {
 public:
  /**
   * @param config   resolved; outlives the ledger. A GPU need not be there: a search has the same
   *                 needs on every device
   * @param longest  tokens of a sequence, at most
   */
  Ledger(const Config& config, int64_t longest);

  /** Whole blocks, of every layer. */
  struct Pieces {
    const char* name;
    Place place;
    int64_t tokens;  // of a block
    int64_t bytes;   // of a block; 0: there are none
  };
  Pieces rows() const;
  Pieces summaries() const;

  /** Blocks of plain rows of a layer for sink and window, where zones may lie elsewhere. */
  int64_t resident_blocks() const;

  /** Whether rows() counts none of these. */
  bool rows_lie_apart() const { return leaves() || shape_.narrows(); }

  Footprint footprint(const Load& load) const;

 private:
  /** As an arena of the device takes it. */
  int64_t taken(int64_t bytes) const;
  bool has_zone() const { return longest_.zone_tokens(sizes_) > 0; }
  /** Rows of the zone have a place in host memory. */
  bool leaves() const { return on_gpu_ && config_.placement == Placement::kHost; }
  bool may_leave() const { return on_gpu_ && config_.placement != Placement::kDevice; }
  /** Whether a sequence of the longest may have such a part. */
  bool has(Part part, const SequenceView& view) const;
  int64_t tables() const;
  /** Tokens behind a zone, at most. */
  int64_t window() const { return sizes_.local + sizes_.update + sizes_.grain; }
  /** More blocks of plain rows, until a zone opens. */
  int64_t opening_blocks() const;
  /** Rows of a layer that are left once others were dropped. */
  int64_t undropped_bytes() const;

  const Config& config_;
  const bool on_gpu_;
  const int64_t alignment_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<Search> search_;
  const ModelShape shape_;
  const RegionSizes sizes_;
  const int64_t most_;
  const Regions longest_;
};

}  // namespace pariskv
