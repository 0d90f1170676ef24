/** Tables in a device's memory, as words of 8 bytes that the host writes in stream order. */
#pragma once

#include <cstdint>

#include "pariskv/stream.h"

namespace pariskv {

struct SequenceView;

class WordUpdates {
 public:
  virtual ~WordUpdates() = default;

  /** Notes that `target`, in device memory, is to become `value`. */
  virtual void update_word(void* target, uint64_t value) = 0;
  /** Sends all noted words: work that `stream` is given from now on sees them. */
  virtual void send_words(Stream stream) = 0;

  /**
   * One token more in all layers of some sequences.
   * @param views  (count) of a sequence's first layer each, in device memory
   */
  virtual void add_token(SequenceView* const* views, int64_t count, int64_t layers,
                         Stream stream) = 0;
};

}  // namespace pariskv
