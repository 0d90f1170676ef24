/**
 * A decode step's running softmax on the CPU, and the rows that a policy selects for it: what lies
 * between a policy's search and attention.
 */
#pragma once

#include "ops.h"

namespace pariskv::cpu {

/** A block that is cut up anew for every call; over a null base it only adds up. */
class Cutter {
 public:
  explicit Cutter(char* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    const int64_t bytes = count * int64_t(sizeof(T));
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 64;
  char* base_;
  int64_t bytes_ = 0;
};

/** Rows to attend to besides the resident ones, per sequence and kv head. */
struct Selection {
  int64_t width;           // rows per head at most
  int32_t* position;       // (batch, heads, width)
  int64_t* count;          // (batch, heads); not set where a sequence is dense
  int64_t tail_width;      // rows per head that stand for the others, at most: see tail.h
  int32_t* tail_number;    // (batch, heads, tail_width) among the rows of the sequence's tail
  int64_t* tail_count;     // (batch, heads); as count
  int32_t* tail_position;  // (batch, tail_width) of the rows of the sequence's tail
  float* tail_weight;      // (batch) of each of them
  /** (batch, query_heads) sum of squares of the shares that they have of an output; null: unasked
   */
  float* tail_squares;
};

/** The running softmax of a batch. */
struct Running {
  float* maximum;   // (batch, query_heads) largest logit
  float* sum;       // (batch, query_heads) sum of exp(logit - maximum)
  float* weighted;  // (batch, query_heads, value_dim) and of that times V
  Selection selection;
};

}  // namespace pariskv::cpu
