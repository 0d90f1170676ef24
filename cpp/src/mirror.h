/**
 * What a GPU has been told of one layer of one sequence: a SequenceView and its two tables,
 * in device memory. Only words that changed are sent again.
 */
#pragma once

#include <vector>

#include "backend.h"

namespace pariskv {

class Mirror {
 public:
  /** Where the view of this layer lies on the device; null: there is no device to tell. */
  explicit Mirror(SequenceView* device = nullptr) : device_(device) {}

  SequenceView* device() const { return device_; }

  /** Tables with room for this many segments; an empty block when those there are have it. */
  Block grown(int64_t segments, Arena& arena) const;

  /** Tells the device of `view`, using `tables` from now on unless they are empty. */
  void publish(const SequenceView& view, int64_t segments, Block& tables, Backend& backend);

  /** The row table's entry of one segment, which lies elsewhere now. */
  void publish_row(int64_t segment, void* rows, Backend& backend);

  /** What was sent may not have arrived: everything will be told anew. */
  void forget() noexcept { known_ = false; }

 private:
  void tell(void* target, uint64_t& told, uint64_t value, Backend& backend);

  SequenceView* device_;
  Block tables_;  // (capacity) row addresses, then (capacity) summary addresses
  int64_t capacity_ = 0;
  bool known_ = false;
  std::vector<uint64_t> words_;    // of the view, as told
  std::vector<uint64_t> entries_;  // of the tables, as told
};

}  // namespace pariskv
