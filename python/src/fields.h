/** Settings as Python values by name: how they print, compare, copy and pickle. */
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>
#include <vector>

namespace pariskv::python {

/** "Name(field=value, ...)", each value as Python's repr: evaluating it gives an equal object. */
inline std::string text_of_fields(const char* name, const nanobind::dict& fields) {
  std::string text = std::string(name) + "(";
  const char* separator = "";
  for (const auto& [field, value] : fields) {
    text += separator + nanobind::cast<std::string>(field) + "=" +
            nanobind::cast<std::string>(nanobind::repr(value));
    separator = ", ";
  }
  return text + ")";
}

/** Types of a field that has more than one. */
enum class Either {
  kNumberOrNone,
  kIntegerOrNone,
  kListOrNone,
  kNumberOrString,
  kIntegerOrString,
  kBytes
};

/** How settings are made of keyword arguments. */
struct Making {
  const char* place;                  // "[config] ", what a sentence about a field begins with
  std::vector<const char*> required;  // fields without a default
  std::vector<const char*> own;       // fields whose values are checked by name, not by type
  std::map<std::string, Either> either{};
  // Types of the stub, where the constructor's own are wider than what is taken.
  std::map<std::string, std::string> types{};
};

/** "typing.Literal['host', 'device']", a type of the stub. */
std::string literal(const std::vector<const char*>& names);

/**
 * The keyword arguments of a constructor, checked against the fields: each is one of them and of
 * the type of its default. Raises TypeError with a sentence that names it.
 */
nanobind::dict checked_fields(const Making& making, const nanobind::dict& fields,
                              const nanobind::args& positional, const nanobind::kwargs& given);

/** `maker(**values)`; a number that it cannot take is named. */
nanobind::object made(const Making& making, nanobind::handle maker, const nanobind::dict& values);

/** A method that takes what `maker` takes, in a signature for the stub. */
struct Signatures {
  std::string constructor, replace;
};
Signatures signatures_of(const Making& making, nanobind::handle maker);

/**
 * What settings have in common in Python: `fields(settings)` gives every keyword argument of the
 * constructor, so that each of these is exact. `maker` takes these arguments and returns settings.
 */
template <typename Settings, typename Fields>
void bind_value(nanobind::class_<Settings>& type, const char* name, Fields fields,
                nanobind::object maker, Making making) {
  namespace nb = nanobind;
  // Never released: it lives as long as the type, which outlives the interpreter's last call.
  const nb::handle held = maker.release();
  const Signatures signatures = signatures_of(making, held);
  type.def(
      "__init__",
      [held, making, fields](Settings* self, const nb::args& positional, const nb::kwargs& given) {
        const nb::dict values = checked_fields(making, fields(Settings()), positional, given);
        new (self) Settings(nb::cast<const Settings&>(made(making, held, values)));
      },
      nb::sig(signatures.constructor.c_str()));
  const auto make = [](const nb::dict& values) { return nb::type<Settings>()(**values); };
  const auto text = [name, fields](const Settings& s) { return text_of_fields(name, fields(s)); };
  const auto replaced = [make, fields](const Settings& s, const nb::kwargs& changes) {
    nb::dict values = fields(s);
    for (const auto& [field, value] : changes) values[field] = value;
    return make(values);
  };
  type.def("__repr__", text)
      .def(
          "__eq__",
          [](const Settings& a, nb::handle b) {
            return nb::isinstance<Settings>(b) && a == nb::cast<const Settings&>(b);
          },
          nb::arg("other").none(), nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [text](const Settings& s) { return nb::hash(nb::cast(text(s))); })
      .def(
          "__getstate__", [fields](const Settings& s) { return fields(s); },
          nb::sig("def __getstate__(self) -> dict[str, Any]"))
      .def(
          "__setstate__",
          [make](Settings& s, const nb::dict& values) {
            new (&s) Settings(nb::cast<const Settings&>(make(values)));
          },
          nb::sig("def __setstate__(self, fields: dict[str, Any], /) -> None"))
      .def("replace", replaced, "The same settings with some of them changed.",
           nb::sig(("def replace" + signatures.replace).c_str()))
      .def("__replace__", replaced, nb::sig(("def __replace__" + signatures.replace).c_str()));
}

}  // namespace pariskv::python
