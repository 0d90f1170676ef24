/** Arguments that are no arrays, by name: what is wrong with one is said in a sentence. */
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "pariskv/cache.h"

namespace pariskv::python {

namespace nb = nanobind;

/** The names that a method takes, in order; at most so many. */
struct Parameters {
  static constexpr size_t kMost = 16;

  Parameters(const char* verb, std::initializer_list<const char*> required,
             std::initializer_list<const char*> optional,
             std::initializer_list<const char*> keywords);

  const char* verb;
  std::vector<const char*> names;
  size_t required, positional;  // how many of the names
};

/** One call's: raises TypeError when one is missing, unknown, given twice or of another type. */
class Arguments {
 public:
  Arguments(const Parameters& parameters, const nb::args& positional, const nb::kwargs& keywords);

  const char* verb() const { return parameters_.verb; }

  /** None where it was left out. */
  nb::handle operator[](const char* name) const;

  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t left_out) const;
  double number(const char* name, double left_out) const;
  std::optional<double> number(const char* name) const;
  bool flag(const char* name) const;
  std::string text(const char* name, const char* left_out) const;

  std::vector<int64_t> integers(const char* name) const;
  std::optional<std::vector<int64_t>> optional_integers(const char* name) const;
  /** A Batch, or the integers that make one. */
  Batch batch(const char* name) const;

  /** One integer, repeated, or as many as there are. */
  std::optional<std::vector<int64_t>> integer_or_integers(const char* name, size_t count) const;

  /** A handle: of a stream, as an integer of 64 bits. */
  std::optional<uintptr_t> stream() const;

 private:
  [[noreturn]] void refuse(const char* name, const char* expected, nb::handle got) const;
  /** Keys where a list belongs: the arguments of another method, in its order. */
  void refuse_misplaced(const char* name, nb::handle value) const;
  int64_t integer_of(const char* name, const char* expected, nb::handle value) const;

  const Parameters& parameters_;
  PyObject* values_[Parameters::kMost] = {};  // borrowed; null: left out
};

/** "expected an integer, got str"; raised as `[place] name: expected ..., got ...`. */
[[noreturn]] void refuse_type(const std::string& place, const std::string& expected,
                              nb::handle got);

}  // namespace pariskv::python
