/** Rows of a zone in 8 bits (narrow.h), in and out, on the CPU. */
#pragma once

#include "cpu/rows.h"
#include "narrow.h"

namespace pariskv::cpu {

/** Those of one head of a sequence. Neighbours share what is taken off: go through them in order.
 */
class NarrowRows {
 public:
  NarrowRows(const Kernels& kernels, const ModelShape& shape, const SequenceView& sequence,
             int64_t head)
      : kernels_(kernels),
        shape_(shape),
        sequence_(sequence),
        head_(head),
        base_(NarrowBase::of(shape.narrow_base, sequence[Part::kState], head)) {}

  /** Whether rows have more than a scale. */
  bool based() const { return base_.any(); }

  void read_key(int64_t position, float* out);
  void read_value(int64_t position, float* out);
  /** A row as one of `dtype`. */
  void read(int64_t position, const RowPlace& out);
  /** From the plain row of a position. */
  void write(const RowPlace& from, int64_t position);

 private:
  /** Goes to the block of a position, to write rows or to read them. */
  void enter(int64_t position, bool to_write);
  RowPlace place(int64_t position) const {
    return narrow_row_at(shape_, sequence_, head_, position);
  }

  const Kernels& kernels_;
  const ModelShape& shape_;
  const SequenceView& sequence_;
  const int64_t head_;
  const NarrowBase base_;
  // Added to keys of this block on their way in, or back: see NarrowBase::Way.
  int64_t block_ = -1;
  bool to_write_ = false;
  float added_[kMaxHeadDim];
  bool has_values_ = false;  // the way of values in
  float value_factor_[kMaxHeadDim], value_added_[kMaxHeadDim];
};

/** A stored row of a position, plain or narrow, as one of tensors. */
void read_row(const Kernels& kernels, const ModelShape& shape, const SequenceView& sequence,
              int64_t head, int64_t position, const RowPlace& out);

/** The stored key of a position, plain or narrow, as floats. */
void read_key_at(const Kernels& kernels, const ModelShape& shape, const SequenceView& sequence,
                 int64_t head, int64_t position, float* out);

}  // namespace pariskv::cpu
