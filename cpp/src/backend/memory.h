/** The memory of a backend: where verbs work, and where rows go to be fetched from. */
#pragma once

#include "memory/arena.h"
#include "paged.h"
#include "pariskv/stream.h"

namespace pariskv {

class BackendMemory {
 public:
  virtual ~BackendMemory() = default;

  /** The memory that verbs work in. */
  virtual Arena& arena() = 0;

  /** Where rows of a zone go to be fetched from; null: they stay where they are. */
  virtual Arena* host_arena() { return nullptr; }

  /** The range that rows of segments lie in, one page each; null: they have no numbers. */
  virtual PageRange pages() { return {}; }

  virtual int64_t scratch_bytes() const = 0;
  /** Overwrites the scratch: data of the last steps can no longer be read from it. */
  virtual void clear_scratch(Stream stream) = 0;

  /**
   * Keeps so many bytes of the device's memory ready, for blocks of any size; throws OutOfMemory if
   * it has fewer. False: nothing is ever kept.
   */
  virtual bool keep_ready(int64_t) { return false; }

  /** Gives unused memory back to where it came from, what was kept ready too. */
  virtual void trim() {}

  /** Bytes of the device's memory as the host may read them; waits for all enqueued work. */
  virtual void fetch(void* target, const void* source, int64_t bytes) = 0;
};

}  // namespace pariskv
