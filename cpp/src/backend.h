/**
 * The verbs, as one interface. A backend trusts its arguments and keeps nothing between
 * calls but its threads or its device.
 */
#pragma once

#include <memory>

#include "ops.h"
#include "pariskv/config.h"
#include "pariskv/stream.h"

namespace pariskv {

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void append(const RowsArgs& args, Stream stream) = 0;
  virtual void read(const RowsArgs& args, Stream stream) = 0;
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;

  /** Rows to summaries, and their statistics added. */
  virtual void encode(const EncodeArgs& args, Stream stream) = 0;
  /** Statistics of keys that leave a zone, taken off again. */
  virtual void forget(const EncodeArgs& args, Stream stream) = 0;

  virtual void prepare_query(const SearchArgs& args, Stream stream) = 0;
  virtual void score(const SearchArgs& args, Stream stream) = 0;
  virtual void select(const SearchArgs& args, Stream stream) = 0;
  virtual void rerank(const SearchArgs& args, Stream stream) = 0;

  virtual void attend_resident(const AttendArgs& args, Stream stream) = 0;
  virtual void attend_selected(const AttendArgs& args, Stream stream) = 0;
  virtual void attend_exact(const AttendExactArgs& args, Stream stream) = 0;
  virtual void exact_logits(const ExactLogitsArgs& args, Stream stream) = 0;
};

/** Throws std::invalid_argument when this build has no backend for the device. */
std::unique_ptr<Backend> make_backend(const Config& config);

namespace cpu {
std::unique_ptr<Backend> make_backend(int64_t threads);
}

}  // namespace pariskv
