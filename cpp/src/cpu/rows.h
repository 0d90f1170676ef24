/** Where rows and elements lie in host memory. */
#pragma once

#include "ops.h"

namespace pariskv::cpu {

/** The K and V row of a position: K first. */
inline char* row_at(const ModelShape& shape, const SequenceView& sequence, int64_t head,
                    int64_t position) {
  const int64_t segment = position / shape.segment_tokens;
  const int64_t slot = position % shape.segment_tokens;
  return static_cast<char*>(sequence.rows[segment]) +
         (head * shape.segment_tokens + slot) * shape.rows.bytes();
}

/** The same of a row of the tail, by its number among them: a copy that lies beside the others. */
inline char* copied_row(const ModelShape& shape, const SequenceView& sequence, int64_t head,
                        int64_t number, int64_t capacity) {
  return sequence.tail_copies + (head * capacity + number) * shape.rows.bytes();
}

/** Element (i, j, 0) of a rank-3 view. */
inline char* element_at(const TensorView& view, int64_t i, int64_t j) {
  return static_cast<char*>(view.data) +
         (i * view.strides[0] + j * view.strides[1]) * size_of(view.dtype);
}

}  // namespace pariskv::cpu
