#include "fields.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "arguments.h"
#include "nearest.h"

namespace pariskv::python {

namespace {

bool among(const std::vector<const char*>& names, const std::string& name) {
  return std::any_of(names.begin(), names.end(), [&](const char* each) { return name == each; });
}

std::string names_of(const nb::dict& fields) {
  std::string text;
  for (const auto& [field, value] : fields) {
    text += (text.empty() ? "" : ", ") + nb::cast<std::string>(field);
  }
  return text;
}

nb::object module_of(nb::handle object) { return nb::getattr(object.type(), "__module__"); }

bool is_number(nb::handle value) {
  return PyFloat_Check(value.ptr()) || PyIndex_Check(value.ptr()) ||
         (nb::hasattr(value, "__float__") && !PyUnicode_Check(value.ptr()));
}

bool is_list(nb::handle value) {
  return PySequence_Check(value.ptr()) != 0 && !PyUnicode_Check(value.ptr());
}

/** What a value has to be that takes the place of `fallback`; empty: it is. */
std::string expected_instead(nb::handle value, nb::handle fallback) {
  if (PyLong_Check(fallback.ptr())) return PyIndex_Check(value.ptr()) ? "" : "an integer";
  if (PyFloat_Check(fallback.ptr())) return is_number(value) ? "" : "a number";
  if (PyUnicode_Check(fallback.ptr())) return PyUnicode_Check(value.ptr()) ? "" : "a string";
  if (PyList_Check(fallback.ptr())) return is_list(value) ? "" : "a list";
  // The rest are settings of our own, or None for the default ones.
  const bool same = module_of(value).equal(module_of(fallback));
  return value.is_none() || same ? "" : "a policy's settings";
}

/** The same for a field that has more than one type. */
std::string expected_instead(nb::handle value, Either kinds) {
  switch (kinds) {
    case Either::kNumberOrNone:
      return value.is_none() || is_number(value) ? "" : "a number or None";
    case Either::kIntegerOrNone:
      return value.is_none() || PyIndex_Check(value.ptr()) ? "" : "an integer or None";
    case Either::kListOrNone:
      return value.is_none() || is_list(value) ? "" : "a list or None";
    case Either::kNumberOrString:
      return is_number(value) || PyUnicode_Check(value.ptr()) ? "" : "a number or a string";
    case Either::kIntegerOrString:
      return PyIndex_Check(value.ptr()) || PyUnicode_Check(value.ptr()) ? ""
                                                                        : "an integer or a string";
    case Either::kBytes:
      return PyIndex_Check(value.ptr()) || PyUnicode_Check(value.ptr())
                 ? ""
                 : "bytes, an integer or as \"4GB\"";
  }
  return "";
}

/** "; did you mean top_k?": a field of these, or of the settings that are among their values. */
std::string meant(const nb::dict& fields, const std::string& given) {
  std::vector<std::string> names;
  for (const auto& [field, value] : fields) names.push_back(nb::cast<std::string>(field));
  const std::string own = did_you_mean(given, names);
  for (const auto& [field, value] : fields) {
    if (module_of(value).equal(nb::str("builtins"))) continue;
    const auto inner = nb::cast<nb::dict>(value.attr("__getstate__")());
    names.clear();
    for (const auto& [name, unused] : inner) names.push_back(nb::cast<std::string>(name));
    const bool exact = inner.contains(given.c_str());
    const std::string name = exact ? given : own.empty() ? nearest(given, names) : "";
    if (name.empty()) continue;
    return "; did you mean " + nb::cast<std::string>(field) + "=" +
           nb::cast<std::string>(nb::getattr(value.type(), "__name__")) + "(" + name + "=...)?";
  }
  return own;
}

/** Of "def name(*, top_k: int = \\0, ...) -> Name": names, and types with a default's mark. */
std::vector<std::pair<std::string, std::string>> parameters_of(const std::string& signature) {
  std::vector<std::pair<std::string, std::string>> found;
  std::string part;
  int depth = 0;
  for (size_t i = signature.find('(') + 1; i < signature.size() && depth >= 0; ++i) {
    const char letter = signature[i];
    if (letter == '[' || letter == '(') ++depth;
    if (letter == ']' || letter == ')') --depth;
    if (depth < 0 || (depth == 0 && letter == ',')) {
      const size_t colon = part.find(": ");
      if (colon != std::string::npos) {
        const size_t begin = part.find_first_not_of(' ');
        found.emplace_back(part.substr(begin, colon - begin), part.substr(colon + 2));
      }
      part.clear();
    } else {
      part += letter;
    }
  }
  return found;
}

}  // namespace

nb::dict checked_fields(const Making& making, const nb::dict& fields, const nb::args& positional,
                        const nb::kwargs& given) {
  const std::string place = making.place;
  if (positional.size() > 0) {
    throw nb::type_error(
        (place + "expected every argument by its name: " + names_of(fields)).c_str());
  }
  nb::dict values;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    if (!fields.contains(key)) {
      const std::string near = meant(fields, name);
      throw nb::type_error((place + name + ": there is no such field" + near +
                            (near.empty() ? "; the" : " The") + " fields are " + names_of(fields))
                               .c_str());
    }
    if (!among(making.own, name)) {
      const auto either = making.either.find(name);
      const std::string expected = either == making.either.end()
                                       ? expected_instead(value, fields[key])
                                       : expected_instead(value, either->second);
      if (!expected.empty()) refuse_type(place + name, expected, value);
    }
    values[key] = value;
  }
  for (const char* name : making.required) {
    if (!values.contains(name)) {
      throw nb::type_error((place + name + ": expected, and not given").c_str());
    }
  }
  return values;
}

nb::object made(const Making& making, nb::handle maker, const nb::dict& values) {
  try {
    return maker(**values);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  // Of the right type, and yet not taken: a number out of the range of its field, or a list of
  // something else.
  for (const auto& [key, value] : values) {
    if (!PyIndex_Check(value.ptr())) continue;
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow == 0 && number >= 0) continue;
    throw nb::value_error((making.place + nb::cast<std::string>(key) +
                           ": expected an integer of 64 bits, not below 0 if it has no sign, got " +
                           nb::steal<nb::str>(PyObject_Str(value.ptr())).c_str())
                              .c_str());
  }
  for (const auto& [key, value] : values) {
    if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) continue;
    throw nb::type_error((making.place + nb::cast<std::string>(key) +
                          ": expected steps of three numbers in the list, got " +
                          nb::repr(value).c_str())
                             .c_str());
  }
  throw nb::type_error((std::string(making.place) + "expected other arguments").c_str());
}

std::string literal(const std::vector<const char*>& names) {
  std::string text = "typing.Literal[";
  for (const char* name : names) {
    text += (text.back() == '[' ? "'" : ", '") + std::string(name) + "'";
  }
  return text + "]";
}

Signatures signatures_of(const Making& making, nb::handle maker) {
  constexpr size_t kLongDefault = 40;  // letters: no signature shows it in full
  // ("def name(*, top_k: int = \\0, ...) -> Name", a docstring, the defaults)
  const auto overload = nb::cast<nb::tuple>(maker.attr("__nb_signature__")[0]);
  const auto defaults = nb::cast<nb::tuple>(overload[2]);
  Signatures made{"def __init__(self, *", "(self, *"};
  for (const auto& [name, declared] : parameters_of(nb::cast<std::string>(overload[0]))) {
    const auto own = making.types.find(name);
    const size_t mark = declared.find(" = \\");
    const std::string type = own == making.types.end() ? declared.substr(0, mark) : own->second;
    made.constructor += ", " + name + ": " + type;
    made.replace += ", " + name + ": " + type + " = ...";
    if (mark == std::string::npos) continue;
    const std::string value = nb::repr(defaults[std::stoul(declared.substr(mark + 4))]).c_str();
    made.constructor += " = " + (value.size() > kLongDefault ? "..." : value);
  }
  made.constructor += ") -> None";
  made.replace += ") -> typing_extensions.Self";
  return made;
}

}  // namespace pariskv::python
