#include "paths.h"

#include <exception>

#include "pariskv/error.h"

namespace pariskv::python {

namespace nb = nanobind;

std::string path_of(const char* verb, nb::handle path) {
  const nb::module_ os = nb::module_::import_("os");
  const bool is_path = nb::isinstance<nb::str>(path) || nb::isinstance<nb::bytes>(path) ||
                       nb::hasattr(path, "__fspath__");
  if (!is_path) {
    throw nb::type_error((std::string("[") + verb +
                          "] path: expected str, bytes or os.PathLike, got " +
                          nb::type_name(path.type()).c_str())
                             .c_str());
  }
  const nb::object encoded = os.attr("fsencode")(path);
  const auto bytes = nb::cast<nb::bytes>(encoded);
  return {bytes.c_str(), bytes.size()};
}

void translate_file_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const FileError& error) {
      // Python chooses the subclass by the number.
      PyObject* arguments = Py_BuildValue("(is)", error.code(), error.what());
      if (arguments == nullptr) return;
      PyErr_SetObject(PyExc_OSError, arguments);
      Py_DECREF(arguments);
    }
  });
}

}  // namespace pariskv::python
