/**
 * The CPU backend: every verb cuts its batch into tasks and hands the inner loops to the
 * kernels of this machine's instruction set. One file per verb in verbs/.
 */
#pragma once

#include "backend.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"

namespace pariskv::cpu {

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int64_t threads) : kernels_(best_kernels()), pool_(threads) {}

  void append(const RowsArgs& args, Stream stream) override;
  void read(const RowsArgs& args, Stream stream) override;
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override;

  void encode(const EncodeArgs& args, Stream stream) override;
  void forget(const EncodeArgs& args, Stream stream) override;

  void prepare_query(const SearchArgs& args, Stream stream) override;
  void score(const SearchArgs& args, Stream stream) override;
  void select(const SearchArgs& args, Stream stream) override;
  void rerank(const SearchArgs& args, Stream stream) override;

  void attend_resident(const AttendArgs& args, Stream stream) override;
  void attend_selected(const AttendArgs& args, Stream stream) override;
  void attend_exact(const AttendExactArgs& args, Stream stream) override;
  void exact_logits(const ExactLogitsArgs& args, Stream stream) override;

 private:
  const Kernels& kernels_;
  ThreadPool pool_;
};

/** The K and V row of a position: K first. */
inline char* row_at(const ModelShape& shape, const SequenceView& sequence, int64_t head,
                    int64_t position) {
  const int64_t segment = position / shape.segment_tokens;
  const int64_t slot = position % shape.segment_tokens;
  return static_cast<char*>(sequence.rows[segment]) +
         (head * shape.segment_tokens + slot) * shape.row_bytes();
}

/** Element (i, j, 0) of a rank-3 view. */
inline char* element_at(const TensorView& view, int64_t i, int64_t j) {
  return static_cast<char*>(view.data) +
         (i * view.strides[0] + j * view.strides[1]) * size_of(view.dtype);
}

}  // namespace pariskv::cpu
