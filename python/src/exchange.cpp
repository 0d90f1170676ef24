#include "exchange.h"

namespace pariskv::python {

namespace {

/** DLPackExchangeAPI, of DLPack 1.3; a table of the same major version begins with the same. */
struct Table {
  struct {
    struct {
      uint32_t major, minor;
    } version;
    void* before;
  } header;
  void* allocator;
  int (*from_object)(void* object, LentTensor** out);
  void* to_object;
  void* tensor_from_object;
  int (*current_work_stream)(int32_t device_type, int32_t device, void** out);
};

constexpr uint32_t kMajor = 1;

/** PyTorch's class of tensors, from when the first one came. Changed with the GIL alone. */
PyObject* tensor_class = nullptr;
const Table* table = nullptr;  // its own; null: it has none that we know

const Table* table_of(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none()) return nullptr;
  auto* found =
      static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (found == nullptr) PyErr_Clear();
  return found != nullptr && found->header.version.major == kMajor ? found : nullptr;
}

/** Whether this is PyTorch's own class: what is derived from it may export itself in another way.
 */
bool is_tensor_class(PyObject* type) {
  if (tensor_class != nullptr) return type == tensor_class;
  static PyObject* refused = nullptr;  // the last one that is not: most callers have one kind
  if (type == refused) return false;
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const nb::object torch = modules.attr("get")("torch");
  const nb::object own = nb::getattr(torch, "Tensor", nb::none());
  if (own.ptr() != type) {
    if (!own.is_none()) refused = type;
    return false;
  }
  tensor_class = nb::object(own).release().ptr();  // there for good
  table = table_of(own);
  return true;
}

}  // namespace

Lent lend(nb::handle array) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()));
  if (!is_tensor_class(type) || table == nullptr) return nullptr;
  LentTensor* lent = nullptr;
  if (table->from_object(array.ptr(), &lent) != 0 || lent == nullptr) {
    PyErr_Clear();  // Python says why
    return nullptr;
  }
  return Lent(lent);
}

std::optional<uintptr_t> current_stream_of_table(int32_t device) {
  if (table == nullptr || table->current_work_stream == nullptr) return std::nullopt;
  void* stream = nullptr;
  if (table->current_work_stream(nb::device::cuda::value, device, &stream) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return reinterpret_cast<uintptr_t>(stream);
}

}  // namespace pariskv::python
