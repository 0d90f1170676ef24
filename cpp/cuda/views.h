/** Tensors of the cache as launches take them. */
#pragma once

#include "arguments.h"
#include "pariskv/tensor_view.h"
#include "tables.h"

namespace pariskv::cuda {

/** A rank-3 view from its row `first` on. */
inline Rows rows_of(const TensorView& view, int64_t first = 0) {
  if (view.data == nullptr) return {};
  return {static_cast<char*>(view.data) + first * view.strides[0] * size_of(view.dtype),
          view.strides[0], view.strides[1]};
}

/** Plain rows of a segment from a slot on, as tensors of K and of V. */
inline Rows keys_of_segment(const ModelShape& shape, char* segment, int64_t slot) {
  const int64_t row = shape.rows.elements();
  return {segment + slot * shape.rows.bytes(), row, shape.segment_tokens * row};
}
inline Rows values_of_segment(const ModelShape& shape, char* segment, int64_t slot) {
  Rows values = keys_of_segment(shape, segment, slot);
  values.data += shape.rows.key_bytes();
  return values;
}

/** What a step is asked for, whatever the policy. */
inline StepCall step_of(const DecodeArgs& args) {
  return {args.shape,          args.batch,      args.layer,        rows_of(args.q),
          rows_of(args.k),     rows_of(args.v), rows_of(args.out), floats_of(args.lse),
          args.lse.strides[0], args.logits};
}

}  // namespace pariskv::cuda
