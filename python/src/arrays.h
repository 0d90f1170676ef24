/**
 * Arrays at the door: anything that speaks DLPack becomes a TensorView, results become
 * arrays of the caller's own library.
 */
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "exchange.h"
#include "pariskv/pariskv.h"

namespace pariskv::python {

namespace nb = nanobind;

/** A view together with what keeps its memory alive. */
struct Borrowed {
  nb::ndarray<nb::ro> readable;
  nb::ndarray<> writable;
  Lent lent;
  TensorView view;
};

/**
 * For reading. Raises TypeError for what is no array, ValueError for what no cache takes and for a
 * tensor that requires a gradient, which would be lost.
 */
Borrowed borrow(const char* verb, const char* argument, nb::handle array, DType expected);

/** For writing: read-only memory is refused. */
Borrowed borrow_writable(const char* verb, const char* argument, nb::handle array, DType expected);

/**
 * An uninitialised array of the library that `like` comes from: PyTorch, or NumPy for
 * everybody else.
 */
nb::object empty_like(nb::handle like, nb::tuple shape, DType dtype);

/** The same from nothing: of NumPy for a cache on the CPU, of PyTorch for one on a GPU. */
nb::object empty_array(nb::tuple shape, const Config& config);

/** PyTorch's current stream on a device; the default one when PyTorch is not there. */
uintptr_t current_stream(int32_t device);

/** "float16", torch.float16 or numpy.float16. */
DType parse_dtype(nb::handle dtype);

}  // namespace pariskv::python
