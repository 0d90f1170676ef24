/** The verbs that every search shares. A backend trusts its arguments and knows no sequences. */
#pragma once

#include "ops.h"
#include "pariskv/stream.h"

namespace pariskv {

/** Work is enqueued on `stream`; on the CPU it is done on return. */
class Verbs {
 public:
  virtual ~Verbs() = default;

  virtual void append(const RowsArgs& args, Stream stream) = 0;
  virtual void read(const RowsArgs& args, Stream stream) = 0;
  /** Lengths of rows of a page table, of pages that serve so many tokens, or 0. */
  virtual void set_lengths(const PagedRows&, const int32_t* lengths, int64_t count, Stream) {
    (void)lengths, (void)count;
  }
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  virtual void zero(void* target, int64_t bytes, Stream stream) = 0;

  virtual void attend_exact(const AttendExactArgs& args, Stream stream) = 0;
  /** Rows that enter zones are written narrow, beside their plain ones. */
  virtual void narrow(const NarrowArgs& args, Stream stream) = 0;
  /** Rows that leave zones are written plain again, beside their narrow ones. */
  virtual void widen(const NarrowArgs& args, Stream stream) = 0;
  virtual void exact_logits(const ExactLogitsArgs& args, Stream stream) = 0;
};

}  // namespace pariskv
