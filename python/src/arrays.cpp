#include "arrays.h"

#include <nanobind/stl/string.h>

#include <atomic>
#include <string>

namespace pariskv::python {

namespace {

std::string place(const char* verb, const char* argument) {
  return std::string("[") + verb + "] " + argument + ": ";
}

/** str(object) */
std::string text_of(nb::handle object) {
  return nb::steal<nb::str>(PyObject_Str(object.ptr())).c_str();
}

std::string dtype_text(nb::dlpack::dtype dtype) {
  const auto code = nb::dlpack::dtype_code(dtype.code);
  const char* name = code == nb::dlpack::dtype_code::Float     ? "float"
                     : code == nb::dlpack::dtype_code::Bfloat  ? "bfloat"
                     : code == nb::dlpack::dtype_code::Int     ? "int"
                     : code == nb::dlpack::dtype_code::UInt    ? "uint"
                     : code == nb::dlpack::dtype_code::Bool    ? "bool"
                     : code == nb::dlpack::dtype_code::Complex ? "complex"
                                                               : "an unknown type of ";
  return name + std::to_string(int(dtype.bits));
}

bool dtype_of(nb::dlpack::dtype dtype, DType& out) {
  const auto code = nb::dlpack::dtype_code(dtype.code);
  if (dtype.lanes != 1) return false;
  if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32) {
    out = DType::kFloat32;
  } else if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16) {
    out = DType::kFloat16;
  } else if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) {
    out = DType::kBFloat16;
  } else {
    return false;
  }
  return true;
}

/** A lent tensor, asked as nanobind's arrays are. */
struct LentArray {
  const nb::dlpack::dltensor& tensor;

  nb::dlpack::dtype dtype() const { return tensor.dtype; }
  size_t ndim() const { return size_t(tensor.ndim); }
  int device_type() const { return tensor.device.device_type; }
  int device_id() const { return tensor.device.device_id; }
  size_t shape(size_t i) const { return size_t(tensor.shape[i]); }
  int64_t stride(size_t i) const { return tensor.strides[i]; }
  void* data() const { return static_cast<char*>(tensor.data) + tensor.byte_offset; }
};

template <typename Array>
TensorView view_of(const char* verb, const char* argument, const Array& array, DType expected) {
  TensorView view;
  if (!dtype_of(array.dtype(), view.dtype)) {
    throw nb::value_error((place(verb, argument) + "expected " + name_of(expected) + ", got " +
                           dtype_text(array.dtype()))
                              .c_str());
  }
  if (array.ndim() > TensorView::kMaxRank) {
    throw nb::value_error((place(verb, argument) + "expected at most " +
                           std::to_string(TensorView::kMaxRank) + " dimensions, got " +
                           std::to_string(array.ndim()))
                              .c_str());
  }
  // Pinned and managed memory are the host's too; a cache on the CPU may read both.
  const bool host = array.device_type() == nb::device::cpu::value ||
                    array.device_type() == nb::device::cuda_host::value ||
                    array.device_type() == nb::device::cuda_managed::value;
  if (!host && array.device_type() != nb::device::cuda::value) {
    throw nb::value_error((place(verb, argument) +
                           "expected memory of a cpu or cuda device, got "
                           "DLPack device type " +
                           std::to_string(array.device_type()))
                              .c_str());
  }
  view.device.type = host ? DeviceType::kCpu : DeviceType::kCuda;
  view.device.index = host ? 0 : array.device_id();
  view.rank = int32_t(array.ndim());
  for (size_t i = 0; i < array.ndim(); ++i) {
    view.shape[i] = int64_t(array.shape(i));
    view.strides[i] = array.stride(i);
  }
  return view;
}

[[noreturn]] void refuse(const char* verb, const char* argument, nb::handle array,
                         const char* expected) {
  throw nb::type_error((place(verb, argument) + "expected " + expected + ", got " +
                        nb::type_name(array.type()).c_str())
                           .c_str());
}

/** NumPy's class of arrays, once it is loaded; null: it is not. */
PyObject* numpy_array() {
  static std::atomic<PyObject*> found{nullptr};  // held as long as the process lives
  if (found == nullptr) {
    const nb::object modules = nb::module_::import_("sys").attr("modules");
    const nb::object numpy = modules.attr("get")("numpy");
    if (!nb::hasattr(numpy, "ndarray")) return nullptr;
    found = nb::object(numpy.attr("ndarray")).release().ptr();
  }
  return found;
}

/** The mask would be ignored in silence, and what it hides attended to. */
void refuse_mask(const char* verb, const char* argument, nb::handle array) {
  PyObject* const plain = numpy_array();
  if (plain == nullptr || array.type().ptr() == plain) return;
  if (!nb::hasattr(array, "mask") || !nb::hasattr(array, "filled")) return;
  throw nb::value_error((place(verb, argument) +
                         "expected an array without a mask, got a masked one, and its mask would "
                         "be ignored; pass " +
                         argument + ".filled(0), or " + argument + ".data without the mask")
                            .c_str());
}

/** The gradient would be lost in silence; PyTorch does not export such tensors by DLPack either. */
void refuse_gradient(const char* verb, const char* argument, nb::handle array) {
  // NumPy's: it has no such attribute, and is slow to say so.
  if (PyObject_CheckBuffer(array.ptr()) != 0) return refuse_mask(verb, argument, array);
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  const auto wanted = nb::steal<nb::object>(PyObject_GetAttr(array.ptr(), name));
  if (!wanted.is_valid()) {
    PyErr_Clear();
  } else if (wanted.ptr() == Py_True) {
    throw nb::value_error((place(verb, argument) +
                           "expected a tensor that requires no gradient, got one that does, and it "
                           "would be lost; pass " +
                           argument + ".detach()")
                              .c_str());
  }
}

/** Whether it was lent; an array of another kind is to be asked in Python. */
bool borrow_lent(const char* verb, const char* argument, nb::handle array, DType expected,
                 bool writes, Borrowed& borrowed) {
  borrowed.lent = lend(array);
  if (!borrowed.lent || borrowed.lent->tensor.strides == nullptr) return false;
  if (writes && (borrowed.lent->flags & LentTensor::kReadOnly) != 0) return false;
  refuse_gradient(verb, argument, array);
  const LentArray tensor{borrowed.lent->tensor};
  borrowed.view = view_of(verb, argument, tensor, expected);
  borrowed.view.data = tensor.data();
  return true;
}

/** PyTorch, if somebody else has imported it; otherwise None. */
nb::object torch_module() {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const nb::object torch = modules.attr("get")("torch");
  return nb::hasattr(torch, "Tensor") ? torch : nb::none();
}

bool is_torch(nb::handle array) {
  const nb::object torch = torch_module();  // a subclass of Tensor counts
  return !torch.is_none() && nb::isinstance(array, torch.attr("Tensor"));
}

}  // namespace

Borrowed borrow(const char* verb, const char* argument, nb::handle array, DType expected) {
  Borrowed lent;
  if (borrow_lent(verb, argument, array, expected, false, lent)) return lent;
  nb::ndarray<nb::ro> borrowed;
  if (!nb::try_cast(array, borrowed)) {
    refuse(verb, argument, array, "an array of numbers in CPU or CUDA memory that speaks DLPack");
  }
  refuse_gradient(verb, argument, array);
  TensorView view = view_of(verb, argument, borrowed, expected);
  view.data = const_cast<void*>(borrowed.data());
  return {std::move(borrowed), {}, {}, view};
}

Borrowed borrow_writable(const char* verb, const char* argument, nb::handle array, DType expected) {
  Borrowed lent;
  if (borrow_lent(verb, argument, array, expected, true, lent)) return lent;
  nb::ndarray<> borrowed;
  if (!nb::try_cast(array, borrowed)) {
    nb::ndarray<nb::ro> readable;
    const bool read_only = nb::try_cast(array, readable);
    refuse(verb, argument, array,
           read_only ? "a writable array, not a read-only one"
                     : "an array of numbers in CPU or CUDA memory that speaks DLPack");
  }
  refuse_gradient(verb, argument, array);
  TensorView view = view_of(verb, argument, borrowed, expected);
  view.data = borrowed.data();
  return {{}, std::move(borrowed), {}, view};
}

nb::object empty_like(nb::handle like, nb::tuple shape, DType dtype) {
  if (is_torch(like)) {
    const nb::module_ torch = nb::module_::import_("torch");
    return like.attr("new_empty")(shape, nb::arg("dtype") = torch.attr(name_of(dtype)),
                                  nb::arg("requires_grad") = false);
  }
  if (dtype == DType::kBFloat16) {
    throw nb::type_error("NumPy has no bfloat16: pass torch tensors, or an array to write to");
  }
  return nb::module_::import_("numpy").attr("empty")(shape, name_of(dtype));
}

nb::object empty_array(nb::tuple shape, const Config& config) {
  if (config.device.type == DeviceType::kCpu) return empty_like(nb::none(), shape, config.dtype);
  const nb::object torch = torch_module();
  if (torch.is_none()) {
    throw nb::type_error(
        "only PyTorch's arrays can be made on a GPU, and it is not imported: "
        "pass arrays to write to");
  }
  return torch.attr("empty")(shape, nb::arg("dtype") = torch.attr(name_of(config.dtype)),
                             nb::arg("device") = "cuda:" + std::to_string(config.device.index));
}

uintptr_t current_stream(int32_t device) {
  if (const auto stream = current_stream_of_table(device)) return *stream;
  const nb::object torch = torch_module();
  if (torch.is_none()) return 0;
  return nb::cast<uintptr_t>(torch.attr("cuda").attr("current_stream")(device).attr("cuda_stream"));
}

DType parse_dtype(nb::handle dtype) {
  const bool is_class = nb::isinstance<nb::type_object>(dtype);
  std::string name = text_of(is_class ? nb::getattr(dtype, "__name__") : nb::borrow(dtype));
  if (name.rfind("torch.", 0) == 0) name = name.substr(6);
  for (const DType known : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (name == name_of(known)) return known;
  }
  throw nb::value_error(
      ("[config] dtype: expected float32, float16 or bfloat16, got " + name).c_str());
}

}  // namespace pariskv::python
