/** The verbs that every search shares. A backend trusts its arguments and knows no sequences. */
#pragma once

#include "check.h"
#include "ops.h"
#include "pariskv/stream.h"

namespace pariskv {

/** Work is enqueued on `stream`; on the CPU it is done on return. */
class Verbs {
 public:
  virtual ~Verbs() = default;

  virtual void append(const RowsArgs& args, Stream stream) = 0;
  virtual void read(const RowsArgs& args, Stream stream) = 0;
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  virtual void zero(void* target, int64_t bytes, Stream stream) = 0;

  virtual void attend_exact(const AttendExactArgs& args, Stream stream) = 0;
  /** Called where ModelShape::narrow is set, which Config::validate keeps to backends that have it.
   */
  virtual void narrow(const NarrowArgs&, Stream) { PKV_ASSERT(false); }
  virtual void exact_logits(const ExactLogitsArgs& args, Stream stream) = 0;
};

}  // namespace pariskv
