/**
 * A GPU's copy of one layer of one sequence: a SequenceView and its tables of segments, in device
 * memory. Only words that changed are sent again.
 */
#pragma once

#include <vector>

#include "backend/word_updates.h"
#include "memory/arena.h"
#include "ops.h"

namespace pariskv {

class DeviceTables {
 public:
  /**
   * @param device   where the view of this layer lies; null: the backend keeps no tables
   * @param narrows  whether rows of the zone have a table of their own
   */
  explicit DeviceTables(SequenceView* device = nullptr, bool narrows = false)
      : device_(device), tables_per_segment_(narrows ? 3 : 2) {}

  SequenceView* device() const { return device_; }

  /** Of tables that have room for so many. */
  static int64_t bytes_of(int64_t segments, bool narrows);

  /** Tables with room for this many segments; an empty block when the present ones have it. */
  Block grown(int64_t segments, Arena& arena) const;

  /**
   * Sends `view`, using `tables` from now on unless they are empty.
   * @param freed  segments whose rows the tables are not to name any more
   */
  void publish(const SequenceView& view, int64_t segments, int64_t narrow_segments,
               const Positions& freed, Block& tables, WordUpdates* updates);

  /** Sends the entry of the zone's rows of one segment, which lie elsewhere now. */
  void publish_row(int64_t segment, void* rows, WordUpdates* updates);

  /** The device has added up to this length by itself. */
  void note_total(int64_t total) noexcept;

  /** Words that were sent may not have arrived: everything will be sent again. */
  void forget() noexcept { known_ = false; }

 private:
  void send(void* target, uint64_t& sent, uint64_t value, WordUpdates& updates);
  bool narrows() const { return tables_per_segment_ == 3; }

  SequenceView* device_;
  int64_t tables_per_segment_;
  Block tables_;  // (capacity) addresses of rows, then of summaries, then of narrow rows if any
  int64_t capacity_ = 0;
  bool known_ = false;
  std::vector<uint64_t> words_;    // of the view, as sent
  std::vector<uint64_t> entries_;  // of the tables, as sent
};

}  // namespace pariskv
