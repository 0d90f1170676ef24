/** A cache's page table: its memory, and which rows of it a call fills. */
#pragma once

#include <vector>

#include "backend/backend.h"
#include "pariskv/pages.h"
#include "validate.h"

namespace pariskv {

class PageTables {
 public:
  /** Throws where rows have no page numbers. */
  PageTables(const Verb& verb, Backend& backend, const ModelShape& shape);
  [[noreturn]] static void refuse(const Verb& verb);

  /** All rows are of length 0. */
  PageTable make(const Verb& verb, int64_t sequences, int64_t tokens, Stream stream);

  /**
   * Rows of the table for a batch, checked; empty: as many as the batch has, from the first on.
   * Good until the next call.
   */
  PagedRows rows(const Verb& verb, const std::vector<int64_t>& rows, int64_t batch);

  /** Whether pages serve a layer of so many tokens, all of whose rows are `near`. */
  bool serve(bool near, int64_t tokens) const {
    return near && tokens <= table_.width * shape_->segment_tokens;
  }

  /** Those of a step, row by row; of rows beyond they are 0. */
  void set_lengths(std::vector<int32_t> lengths, Stream stream);

 private:
  Backend* backend_;
  const ModelShape* shape_;
  Block block_;  // lengths, then pages
  PageTable table_{};
  std::vector<int32_t> numbers_;  // rows that the present call fills
  int64_t filled_ = 0;            // rows from here on are of length 0
};

}  // namespace pariskv
