/** Rows as pages that other kernels read, as the verbs see them: see pariskv/pages.h. */
#pragma once

#include <cstdint>
#include <functional>

namespace pariskv {

/** Pages of one range of addresses, one every `page_bytes`. */
struct PageRange {
  char* data;
  int64_t page_bytes;
  int64_t count;

  bool has(const void* page) const {
    const auto* at = static_cast<const char*>(page);
    return at >= data && at < data + count * page_bytes;
  }
};

/** The page table of a step, in the device's memory, and the rows that a call fills. */
struct PagedRows {
  PageRange range;
  int32_t* pages;    // (rows, width)
  int32_t* lengths;  // (rows)
  int64_t width;
  /**
   * (batch) of the table, in the host's memory; null: row i is the i-th's. ~row: pages do not serve
   * this sequence.
   */
  int32_t* rows;
};

/**
 * A step whose sequences other kernels attend to as far as pages serve them: those whose length in
 * the table is not 0, which is known before the step.
 */
struct PagedStep {
  PagedRows table;
  int64_t unserved;  // sequences of the step that pages do not serve; of an eager one
  const std::function<void()>* dense;  // gives the device the other kernels' work
};

}  // namespace pariskv
