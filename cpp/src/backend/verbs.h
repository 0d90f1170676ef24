/** The verbs: a backend's computations. It trusts its arguments and knows nothing of sequences. */
#pragma once

#include "ops.h"
#include "pariskv/stream.h"
#include "policy/upkeep.h"

namespace pariskv {

/** Work is enqueued on `stream`; on the CPU it is done on return. */
class Verbs {
 public:
  virtual ~Verbs() = default;

  virtual void append(const RowsArgs& args, Stream stream) = 0;
  virtual void read(const RowsArgs& args, Stream stream) = 0;
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  virtual void zero(void* target, int64_t bytes, Stream stream) = 0;

  /** Copies rows of tails to where they lie side by side. */
  virtual void keep(const KeepArgs& args, Stream stream) = 0;

  /** Writes queries to where they are remembered. */
  virtual void remember(const RememberArgs& args, Stream stream) = 0;

  /** Sees that keep_up of this needs no memory it does not have. */
  virtual void reserve(const Upkeep& upkeep) = 0;

  /** The policy's own work when tokens enter or leave a zone. */
  virtual void keep_up(const Upkeep& upkeep, Stream stream) = 0;

  /** Sees that the next decode of these sequences needs no memory it does not have. */
  virtual void reserve(const DecodeArgs& args) = 0;

  /**
   * One token of each sequence: attention to resident rows, the policy's own search, attention to
   * the rows it selects. Where Capabilities::decode_appends, it also writes the token's own row.
   * A token that is appended has its query remembered, where queries are.
   */
  virtual void decode(const DecodeArgs& args, Stream stream) = 0;

  /** The path of a decode for the first sequence; returns when it is known. */
  virtual Trace trace(const DecodeArgs& args, Stream stream) = 0;

  virtual void attend_exact(const AttendExactArgs& args, Stream stream) = 0;
  virtual void exact_logits(const ExactLogitsArgs& args, Stream stream) = 0;

  /** Candidates and rows of all decodes so far. */
  virtual DecodeCounts counts() = 0;
};

}  // namespace pariskv
