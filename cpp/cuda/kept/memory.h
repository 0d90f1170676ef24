/** What searches that keep rows have of a GPU: recent queries, and scratch of choices. */
#pragma once

#include "choices.h"
#include "cuda_backend.h"

namespace pariskv::cuda {

/** Writes queries to where they are remembered. */
void remember(CudaBackend& backend, const RememberArgs& args, Stream stream);

/** Scratch of choices: it grows, and never holds old and new together. */
class ChoiceMemory {
 public:
  explicit ChoiceMemory(CudaBackend& backend) : backend_(backend) {}

  void reserve(int64_t bytes);
  char* data() const { return block_.as<char>(); }
  int64_t taken() const { return block_.taken(); }
  void clear() { block_ = Block(); }

 private:
  CudaBackend& backend_;
  Block block_;
};

}  // namespace pariskv::cuda
