/** A block of rows that goes to the other memory, or has a copy there. */
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pariskv/cache.h"
#include "store.h"

namespace pariskv {

/** Bytes of rows that are copied with one ticket, and so are done together. */
constexpr int64_t kMostOfTicket = int64_t{32} << 20;

/** A block of rows of a cache. Forks of the sequence may share it, and outlive the sequence. */
struct RowsPlace {
  SequenceId sequence;  // -1: it was not said
  int64_t layer, segment;
};

struct MovingRows {
  std::weak_ptr<RowBlock> rows;  // gone when all sequences have dropped them
  RowsPlace place;
  int64_t bytes;
};

/**
 * Starts copies of rows from `first` on, before `end`, as many as one ticket has.
 * @return the first one that was not started
 */
template <typename Rows>
size_t start_some(const Rows& moving, size_t first, size_t end, Stream stream) {
  std::vector<std::shared_ptr<RowBlock>> rows;
  for (int64_t bytes = 0; first < end && bytes < kMostOfTicket; ++first) {
    std::shared_ptr<RowBlock> own = moving[first].rows.lock();
    if (!own) continue;
    bytes += moving[first].bytes;
    rows.push_back(std::move(own));
  }
  RowBlock::start_offloads(rows, stream);
  return first;
}

}  // namespace pariskv
