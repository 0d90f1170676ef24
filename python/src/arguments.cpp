#include "arguments.h"

#include <cstring>

#include "nearest.h"

namespace pariskv::python {

namespace {

std::string list_of(const std::vector<const char*>& names) {
  std::string text;
  for (const char* name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

}  // namespace

void refuse_type(const std::string& place, const std::string& expected, nb::handle got) {
  throw nb::type_error(
      (place + ": expected " + expected + ", got " + nb::type_name(got.type()).c_str()).c_str());
}

Parameters::Parameters(const char* verb, std::initializer_list<const char*> required,
                       std::initializer_list<const char*> optional,
                       std::initializer_list<const char*> keywords)
    : verb(verb), names(required), required(required.size()) {
  names.insert(names.end(), optional);
  positional = names.size();
  names.insert(names.end(), keywords);
}

Arguments::Arguments(const Parameters& parameters, const nb::args& positional,
                     const nb::kwargs& keywords)
    : parameters_(parameters) {
  const std::string place = std::string("[") + parameters.verb + "] ";
  const std::vector<const char*>& names = parameters.names;
  if (positional.size() > parameters.positional) {
    throw nb::type_error((place + "expected at most " + std::to_string(parameters.positional) +
                          " arguments without a name, got " + std::to_string(positional.size()) +
                          "; the arguments are " + list_of(names))
                             .c_str());
  }
  for (size_t i = 0; i < positional.size(); ++i) values_[i] = positional[i].ptr();
  for (const auto& [key, value] : keywords) {
    const char* given = nb::borrow<nb::str>(key).c_str();
    size_t i = 0;
    while (i < names.size() && std::strcmp(names[i], given) != 0) ++i;
    if (i == names.size()) {
      const std::string meant = did_you_mean(given, {names.begin(), names.end()});
      throw nb::type_error((place + given + ": there is no such argument" + meant +
                            (meant.empty() ? "; the" : " The") + " arguments are " + list_of(names))
                               .c_str());
    }
    if (values_[i] != nullptr) {
      throw nb::type_error((place + given + ": expected once, got it twice").c_str());
    }
    values_[i] = value.ptr();
  }
  for (size_t i = 0; i < parameters.required; ++i) {
    if (values_[i] == nullptr) {
      throw nb::type_error((place + names[i] + ": expected, and not given").c_str());
    }
  }
}

nb::handle Arguments::operator[](const char* name) const {
  for (size_t i = 0; i < parameters_.names.size(); ++i) {
    if (std::strcmp(parameters_.names[i], name) != 0) continue;
    return values_[i] == nullptr ? nb::handle(Py_None) : nb::handle(values_[i]);
  }
  return Py_None;
}

void Arguments::refuse(const char* name, const char* expected, nb::handle got) const {
  refuse_type(std::string("[") + verb() + "] " + name, expected, got);
}

int64_t Arguments::integer_of(const char* name, const char* expected, nb::handle value) const {
  if (!PyIndex_Check(value.ptr())) refuse(name, expected, value);
  const auto index = nb::steal<nb::object>(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {  // an array of several numbers, most likely
    PyErr_Clear();
    refuse(name, expected, value);
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) {
    throw nb::value_error((std::string("[") + verb() + "] " + name +
                           ": expected an integer of 64 bits, got " +
                           nb::steal<nb::str>(PyObject_Str(index.ptr())).c_str())
                              .c_str());
  }
  return number;
}

int64_t Arguments::integer(const char* name) const {
  return integer_of(name, "an integer", (*this)[name]);
}

int64_t Arguments::integer(const char* name, int64_t left_out) const {
  for (size_t i = 0; i < parameters_.names.size(); ++i) {
    if (std::strcmp(parameters_.names[i], name) == 0 && values_[i] != nullptr) return integer(name);
  }
  return left_out;
}

std::optional<double> Arguments::number(const char* name) const {
  const nb::handle value = (*this)[name];
  if (value.is_none()) return std::nullopt;
  const bool is_number =
      PyFloat_Check(value.ptr()) || PyIndex_Check(value.ptr()) || nb::hasattr(value, "__float__");
  if (!is_number) refuse(name, "a number", value);
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse(name, "a number", value);
  }
  return number;
}

double Arguments::number(const char* name, double left_out) const {
  return number(name).value_or(left_out);
}

bool Arguments::flag(const char* name) const {
  const nb::handle value = (*this)[name];
  if (value.is_none()) return false;
  if (!PyBool_Check(value.ptr())) refuse(name, "True or False", value);
  return value.ptr() == Py_True;
}

std::string Arguments::text(const char* name, const char* left_out) const {
  const nb::handle value = (*this)[name];
  if (value.is_none()) return left_out;
  const char* given =
      PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), nullptr) : nullptr;
  if (given == nullptr) {
    PyErr_Clear();  // a string that is no text
    refuse(name, "a string", value);
  }
  return given;
}

void Arguments::refuse_misplaced(const char* name, nb::handle value) const {
  if (!nb::hasattr(value, "__dlpack__")) return;
  const nb::object dimensions = nb::getattr(value, "ndim", nb::none());
  if (!PyLong_Check(dimensions.ptr()) || PyLong_AsLong(dimensions.ptr()) < 2) return;
  const auto& names = parameters_.names;
  std::string text = std::string("[") + verb() + "] " + name +
                     ": expected a list of integers, got an array of " +
                     nb::steal<nb::str>(PyObject_Str(dimensions.ptr())).c_str() +
                     " dimensions; the order of arguments is " +
                     list_of({names.begin(), names.begin() + long(parameters_.positional)});
  if (parameters_.positional < names.size()) {
    text += ", and by name alone " +
            list_of({names.begin() + long(parameters_.positional), names.end()});
  }
  throw nb::type_error(text.c_str());
}

std::vector<int64_t> Arguments::integers(const char* name) const {
  constexpr const char* kExpected = "a list of integers";
  const nb::handle value = (*this)[name];
  const bool is_text = PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr());
  if (is_text || PySequence_Check(value.ptr()) == 0) {
    refuse_misplaced(name, value);  // a tensor of torch is no sequence
    refuse(name, kExpected, value);
  }
  const auto list = nb::steal<nb::object>(PySequence_Fast(value.ptr(), ""));
  if (!list.is_valid()) {
    PyErr_Clear();
    refuse(name, kExpected, value);
  }
  std::vector<int64_t> integers;
  const size_t count = nb::len(list);
  integers.reserve(count);
  if (count > 0 && !PyLong_Check(nb::object(list[0]).ptr())) refuse_misplaced(name, value);
  for (size_t i = 0; i < count; ++i) {
    const nb::object item = list[i];
    integers.push_back(integer_of(name, "integers alone in the list", item));
  }
  return integers;
}

Batch Arguments::batch(const char* name) const {
  const nb::handle value = (*this)[name];
  if (nb::isinstance<Batch>(value)) return nb::cast<const Batch&>(value);
  return integers(name);
}

std::optional<std::vector<int64_t>> Arguments::optional_integers(const char* name) const {
  if ((*this)[name].is_none()) return std::nullopt;
  return integers(name);
}

std::optional<std::vector<int64_t>> Arguments::integer_or_integers(const char* name,
                                                                   size_t count) const {
  const nb::handle value = (*this)[name];
  if (value.is_none()) return std::nullopt;
  if (PyIndex_Check(value.ptr())) return std::vector<int64_t>(count, integer(name));
  if (PyUnicode_Check(value.ptr()) || PySequence_Check(value.ptr()) == 0) {
    refuse(name, "an integer or a list of integers", value);
  }
  return integers(name);
}

std::optional<uintptr_t> Arguments::stream() const {
  const nb::handle value = (*this)["stream"];
  if (value.is_none()) return std::nullopt;
  constexpr const char* kExpected = "a stream's handle, an integer of 0 or more";
  if (!PyIndex_Check(value.ptr())) refuse("stream", kExpected, value);
  const auto index = nb::steal<nb::object>(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  const size_t handle = PyLong_AsSize_t(index.ptr());
  if (handle == size_t(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error((std::string("[") + verb() + "] stream: expected " + kExpected +
                           ", got " + nb::steal<nb::str>(PyObject_Str(index.ptr())).c_str())
                              .c_str());
  }
  return handle;
}

}  // namespace pariskv::python
