/** The order of calls on a device that works on its own time. A CPU needs none of it. */
#pragma once

#include "pariskv/stream.h"

namespace pariskv {

/** Work of one call comes after all work of earlier calls, whatever their streams. */
class CallOrder {
 public:
  virtual ~CallOrder() = default;

  /** Whether `stream` is being captured into a graph: work is recorded, not done. */
  virtual bool capturing(Stream) { return false; }
  virtual void enter(Stream) {}
  virtual void leave(Stream) noexcept {}
  /** Replays on this stream are invisible to us from now on: order every later call after them. */
  virtual void expect_replays(Stream) {}
};

}  // namespace pariskv
