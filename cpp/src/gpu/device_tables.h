/**
 * A GPU's copy of one layer of one sequence: a SequenceView and its two tables of segments, in
 * device memory. Only words that changed are sent again.
 */
#pragma once

#include <vector>

#include "backend/word_updates.h"
#include "memory/arena.h"
#include "ops.h"

namespace pariskv {

class DeviceTables {
 public:
  /** Where the view of this layer lies on the device; null: the backend keeps no tables. */
  explicit DeviceTables(SequenceView* device = nullptr) : device_(device) {}

  SequenceView* device() const { return device_; }

  /** Tables with room for this many segments; an empty block when the present ones have it. */
  Block grown(int64_t segments, Arena& arena) const;

  /** Sends `view`, using `tables` from now on unless they are empty. */
  void publish(const SequenceView& view, int64_t segments, Block& tables, WordUpdates* updates);

  /** Sends the row table's entry of one segment, which lies elsewhere now. */
  void publish_row(int64_t segment, void* rows, WordUpdates* updates);

  /** Words that were sent may not have arrived: everything will be sent again. */
  void forget() noexcept { known_ = false; }

 private:
  void send(void* target, uint64_t& sent, uint64_t value, WordUpdates& updates);

  SequenceView* device_;
  Block tables_;  // (capacity) row addresses, then (capacity) summary addresses
  int64_t capacity_ = 0;
  bool known_ = false;
  std::vector<uint64_t> words_;    // of the view, as sent
  std::vector<uint64_t> entries_;  // of the tables, as sent
};

}  // namespace pariskv
