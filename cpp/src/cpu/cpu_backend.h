/**
 * The CPU backend: every verb cuts its batch into tasks and hands the inner loops to the
 * kernels of this machine's instruction set. One file per verb in verbs/.
 */
#pragma once

#include "backend.h"
#include "cpu/search.h"
#include "cpu/simd/kernels.h"
#include "cpu/thread_pool.h"

namespace pariskv::cpu {

class CpuBackend : public Backend {
 public:
  CpuBackend(const Config& config, const Resources& resources);

  void append(const RowsArgs& args, Stream stream) override;
  void read(const RowsArgs& args, Stream stream) override;
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override;
  void zero(void* target, int64_t bytes, Stream stream) override;

  void encode(const EncodeArgs& args, Stream stream) override;
  void forget(const EncodeArgs& args, Stream stream) override;

  void reserve(const DecodeArgs& args) override;
  void decode(const DecodeArgs& args, Stream stream) override;
  SearchTrace trace(const DecodeArgs& args, Stream stream) override;

  void attend_exact(const AttendExactArgs& args, Stream stream) override;
  void exact_logits(const ExactLogitsArgs& args, Stream stream) override;

  DecodeCounts counts() override { return counts_; }
  Arena& arena() override { return arena_; }
  int64_t scratch_bytes() const override { return scratch_.bytes(); }
  void clear_scratch(Stream) override { scratch_ = Block(); }  // zeroed as it goes
  void fetch(void* target, const void* source, int64_t bytes) override;

 private:
  /** Cuts the scratch of a decode, or measures it. */
  Running cut(const DecodeArgs& args, Cutter& cutter);

  void attend_resident(const SearchArgs& args);
  void prepare_query(const SearchArgs& args);
  void score(const SearchArgs& args);
  void select(const SearchArgs& args);
  void rerank(const SearchArgs& args);
  void attend_selected(const SearchArgs& args);

  const Kernels& kernels_;
  ThreadPool pool_;
  Arena arena_;
  Block scratch_;
  std::vector<SearchItem> items_;  // of the last decode, over the scratch
  DecodeCounts counts_;
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
