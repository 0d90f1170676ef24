/**
 * PyTorch's tensors by DLPack's table of C functions: a tenth of the time that the protocol's
 * Python takes, which a step of a few microseconds notices.
 */
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace pariskv::python {

namespace nb = nanobind;

/** A tensor that was lent by such a table: DLManagedTensorVersioned, of DLPack 1. */
struct LentTensor {
  struct {
    uint32_t major, minor;
  } version;
  void* context;
  void (*deleter)(LentTensor* self);
  uint64_t flags;
  nb::dlpack::dltensor tensor;

  static constexpr uint64_t kReadOnly = 1;
};

struct GiveBack {
  void operator()(LentTensor* lent) const {
    if (lent->deleter != nullptr) lent->deleter(lent);
  }
};
using Lent = std::unique_ptr<LentTensor, GiveBack>;

/** Null: it is no tensor of PyTorch's own class, or PyTorch has no table; ask it in Python. */
Lent lend(nb::handle array);

/** The current stream of PyTorch on a GPU, once a tensor was lent; else nothing. */
std::optional<uintptr_t> current_stream_of_table(int32_t device);

}  // namespace pariskv::python
